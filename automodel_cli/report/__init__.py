"""Plots and the offline HTML report of runs."""
