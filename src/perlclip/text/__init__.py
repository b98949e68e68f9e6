"""Classes as text: names, templates, what is novel."""
