"""The application around the library: data sets, comparisons, figures, the page, the command line."""
