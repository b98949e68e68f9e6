"""Classifiers in closed form beside a method's texts: for classes trained on, and for new ones by their texts."""
