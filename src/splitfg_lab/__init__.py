"""The laboratory: data, resumable runs, the paper's experiments, reports and the ``splitfg`` command.

It uses the library :mod:`splitfg`, which never imports it.
"""
