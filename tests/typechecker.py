"""The runtime type checker of the tests: a whole number is a fine float."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
