"""Computes in lower precision: products in 8 bits with their scales, and the statistics by which precision is watched
and chosen."""
