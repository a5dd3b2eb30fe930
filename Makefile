# Two commands set everything up: `make demo` and `make test`.
