"""Magics and widgets; the only place that imports IPython or ipywidgets."""
