"""Make sheets from the results of studies."""
