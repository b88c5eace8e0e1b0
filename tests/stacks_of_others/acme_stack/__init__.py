"""Stacks that a user could bring. They know the protocol and torch, and nothing else of the product."""
