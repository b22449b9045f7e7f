"""The common corruptions of images (Hendrycks and Dietterich 2019): made anew, or read from files."""
