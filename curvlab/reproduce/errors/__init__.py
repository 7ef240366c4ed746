"""Tables 2 to 5: layer-wise errors of the curvature matrices along training."""
