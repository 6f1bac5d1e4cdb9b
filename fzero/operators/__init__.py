"""Defines operators of our own: each is one node of a graph, run eagerly by one function and expanded into others for a
compiler."""
