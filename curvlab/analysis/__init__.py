"""Questions to a curvature: spectra, densities, comparisons, and the loss around a point."""
