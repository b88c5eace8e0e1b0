"""What a rank says about itself and its links."""
