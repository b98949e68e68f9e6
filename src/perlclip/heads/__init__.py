"""Classifiers in closed form beside a method's text classifier, for the classes that were trained on."""
