"""Isolation of packed documents outside of attention: recurrent layers and length-dependent rotary tables."""
