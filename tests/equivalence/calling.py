"""Methods of every name and signature, wrong arguments, what is no method at all, and Ray's magic methods."""

from __future__ import annotations

import asyncio
import inspect
import threading

from helpers import get

from equivalence.actors import OddNames
from equivalence.world import case, table

table(
    "method",
    {
        "no arguments, None": lambda w: get(w.methods.nothing.remote()),
        "default argument": lambda w: get(w.methods.echo.remote()),
        "positional": lambda w: get(w.methods.every_kind.remote(1)),
        "*args and **kwargs": lambda w: get(w.methods.every_kind.remote(1, 5, 6, 7, c=8, d=9, e=10)),
        "keyword only": lambda w: get(w.methods.keyword_only.remote(key="k")),
        "positional only": lambda w: get(w.methods.positional_only.remote(4, b=5)),
        "arguments by name": lambda w: get(w.methods.two.remote(b=1, a=2)),
        "static": lambda w: get(w.methods.static.remote(4)),
        "class": lambda w: get(w.methods.of_class.remote(4)),
        "inherited": lambda w: get(w.methods.inherited.remote(4)),
        "overridden": lambda w: get(w.methods.overridden.remote()),
        "underscore": lambda w: get(w.methods._underscore.remote(4)),
        "mangled name": lambda w: get(w.methods._Methods__mangled.remote()),
        "dunder __len__": lambda w: get(w.methods.__len__.remote()),
        "dunder __call__": lambda w: get(w.methods.__call__.remote(4)),
        "parameters named as our options": lambda w: get(
            w.methods.our_names.remote(1, on_unavailable="a", on_pending="b", policy="c")
        ),
        "keywords named as our options": lambda w: get(
            w.methods.keywords.remote(timeout_s=1, on_unavailable=2, on_pending=3, handle=4, actor=5, error=6)
        ),
        "parameters named as Ray's options": lambda w: get(
            w.methods.rays_names.remote(name="n", num_returns=9, args=[1], kwargs={"a": 1})
        ),
        "keywords named as internals": lambda w: get(w.methods.keywords.remote(method=1, cls=2, state=3, options=4)),
        "method object kept and used again": lambda w: [get(m.remote(i)) for m in [w.methods.echo] for i in range(3)],
        "._remote(args, kwargs)": lambda w: get(w.methods.two._remote([1], {"b": 2})),
        "._remote with options": lambda w: get(w.methods.task_name._remote(name="by _remote")),
        "invocation decorator": lambda w: get(w.methods.decorated.remote(4)),
        "call result type": lambda w: w.methods.echo.remote(1),
    },
)

for _name in [name for name, one in vars(OddNames).items() if inspect.isfunction(one) and not name.startswith("_")]:
    table(
        "method named",
        {_name: lambda w, name=_name: get(getattr(w.shared(OddNames), name).remote())},
    )

table(
    "handle attribute beats a method",
    {
        "_actor_id": lambda w: type(w.shared(OddNames)._actor_id).__name__,
        "_get_local_state": lambda w: [get(w.shared(OddNames).call.remote()), w.shared(OddNames)._get_local_state()],
    },
)

table(
    "wrong arguments",
    {
        "missing": lambda w: w.methods.two.remote(1),
        "missing keyword only": lambda w: w.methods.keyword_only.remote(),
        "too many": lambda w: w.methods.two.remote(1, 2, 3),
        "unexpected keyword": lambda w: w.methods.two.remote(1, 2, c=3),
        "given twice": lambda w: w.methods.two.remote(1, a=2),
        "positional only by name": lambda w: w.methods.positional_only.remote(a=1),
        "a keyword named self": lambda w: w.methods.keywords.remote(self=1),
        "with options": lambda w: w.methods.two.options(name="n").remote(1),
        "of a static method": lambda w: w.methods.static.remote(),
        "unpicklable": lambda w: w.methods.echo.remote(threading.Lock()),
    },
    raises=TypeError,
)

case(
    "wrong arguments: a keyword named self, with options",
    raises=TypeError,
    text_differs="Python names the function that noticed",
)(lambda w: w.methods.keywords.options(name="n").remote(self=1))

table(
    "unknown attribute",
    {
        "method": lambda w: w.methods.no_such_method.remote(),
        "underscore": lambda w: w.methods._no_such_method,
        "dunder": lambda w: w.methods.__no_such_method__,
        "property is not a method": lambda w: w.methods.a_property,
        "class attribute is not a method": lambda w: w.methods.answer,
        "of a method": lambda w: w.methods.echo.no_such_attribute,
        "dunder of a method": lambda w: w.methods.echo.__no_such_attribute__,
    },
    raises=AttributeError,
)

table(
    "call without .remote",
    {
        "method": lambda w: w.methods.echo(1),
        "handle": lambda w: w.methods(1),
        "static": lambda w: w.methods.static(1),
        "len of the handle": lambda w: len(w.methods),
        "iterate over the handle": lambda w: list(w.methods),
        "await the handle": lambda w: asyncio.run(asyncio.wait_for(w.methods, 1)),
    },
    raises=TypeError,
)

table(
    "magic method",
    {
        "__ray_ready__": lambda w: get(w.methods.__ray_ready__.remote()),
        "__ray_call__": lambda w: get(w.methods.__ray_call__.remote(lambda self, x, y=0: (self.answer, x, y), 1, y=2)),
        "__ray_call__ with options": lambda w: [
            get(ref) for ref in w.methods.__ray_call__.options(num_returns=2, name="called").remote(lambda self: (1, 2))
        ],
        "__ray_call__ of an async actor": lambda w: get(
            w.asynchronous.__ray_call__.remote(lambda self: type(self).__name__)
        ),
    },
)
