"""curvlab beside other packages: the same numbers where they compute the same thing.

No peer is a dependency of curvlab: a script says what to install, a test is skipped.
"""
