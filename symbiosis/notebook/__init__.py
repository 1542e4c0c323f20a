"""Magics and the dashboard; the only place that imports IPython or ipywidgets."""
