"""Instances as domains of Xen's, by way of xl."""
