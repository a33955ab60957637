"""Texts of the past that later runs replay."""
