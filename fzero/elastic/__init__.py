"""Keeps runs going when ranks are lost: states in the memory of their hosts, ranks started again one by one
(`fz.run`)."""
