"""Building what an `ObjectSpec` describes, in the process where it is needed. Nothing is looked up in globals."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from verl_contracts.plugins import Family, build_plugin, check_plugin, find_class

if TYPE_CHECKING:
    from verl_contracts.runtime import ActorContext, ObjectSpec

__all__ = ["build_object"]

P = TypeVar("P")


def build_object(spec: ObjectSpec, protocol: type[P], *, context: ActorContext, name: str) -> P:
    """Return ``Class(context=context, **arguments)``, checked against `protocol`.

    `name` says in messages what it is, for example ``"reward client"``. Raises `PluginError` for a class that cannot
    be found or does not meet the protocol, `ConfigError` for wrong arguments.
    """
    role = f"{context.role}[{context.rank}]"
    family = Family(name=name, group="", protocol=protocol, key=name, arguments=("context",))
    cls = find_class(spec.path, key=name, role=role)
    check_plugin(family, cls, key=name, role=role)
    built: object = build_plugin(cls, spec.arguments, key=name, arguments={"context": context})
    return cast("P", built)  # its class was checked above, member by member
