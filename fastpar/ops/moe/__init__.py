"""Mixture of experts: routing, dispatch and combine, the experts' GEMMs; `fastpar.ops` has the public names."""
