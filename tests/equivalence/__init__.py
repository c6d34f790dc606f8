"""A wrapped handle does what a plain one does: one table of cases, each run on plain and on wrapped handles.

A case is a function of a `World`, which makes actors the plain or the wrapped way and is otherwise the same. What a
case returns or raises in the plain world is the specification: value, type of the result, class and text of the error
must be the same in the wrapped worlds. `raises=` says what the plain world is known to raise, so that a case that
breaks for a reason of its own does not pass as "equally broken". The ids are the list that the documentation quotes.

`world` defines and runs a case, `actors` has the classes that it uses, and each other module has the cases of one
topic. `test_equivalence.py` imports the topics, which fills the table, and compares the worlds.
"""
