"""Advantages of samples: the built-in estimators, one file each, and the interface of your own."""
