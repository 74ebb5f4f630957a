"""How models are trained."""
