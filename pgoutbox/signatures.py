"""Checks of a handler's signature at its registration: its parameters, and whether a worker can run it.

Annotations are checked if they can be resolved. A name that only a type checker imports is ignored, and so are the
annotations of a decorated function, which belong to the wrapped function.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message


def is_async(function: Callable[..., object]) -> bool:
    """Whether a call returns an awaitable: an async function, a partial of one, or an object with an async call."""
    return inspect.iscoroutinefunction(_code_of(function))


def check_handler(
    function: Callable[..., object],
    *,
    place: str,
    contexts: tuple[type, type],
    is_batch: bool,
    model: type[BaseModel] | None,
) -> None:
    """Raise `ConfigurationError` unless a worker can call the function with a message and a context.

    `contexts` are the context classes of async and of plain functions. A batch handler gets lists of messages and
    contexts. `model` is the payload model of the topic. `place` is the start of the error's text.
    """
    if not callable(function):
        raise ConfigurationError(f"{place}: must be a function, got {function!r}")
    if isinstance(function, type):
        raise ConfigurationError(f"{place}: is a class; register a function, or an instance with a method __call__")
    code = _code_of(function)
    if inspect.isasyncgenfunction(code) or inspect.isgeneratorfunction(code):
        raise ConfigurationError(f"{place}: is a generator; a handler must return its result instead of yielding")
    context = contexts[0 if is_async(function) else 1]
    try:
        signature = inspect.signature(function)
        signature.bind(object(), object())
    except (TypeError, ValueError):
        wanted = "lists of messages and of contexts" if is_batch else "the message and the context"
        raise ConfigurationError(f"{place}: must take two arguments, {wanted}") from None
    if hasattr(function, "__wrapped__"):
        return
    parameters = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for parameter, kind in zip(parameters, (Message, context), strict=False):
        hint = _resolve(parameter.annotation, code)
        if not _accepts(hint, kind, is_batch=is_batch):
            raise ConfigurationError(_mismatch(place, parameter, context, is_batch=is_batch))
        if kind is Message:
            _check_payload(hint, model, f"{place}: parameter {parameter.name!r}")


def _code_of(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function or method that a call of this object runs."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):
        return function
    return getattr(function, "__call__", function)  # noqa: B004 - the method itself, not whether there is one


def _resolve(annotation: object, code: Callable[..., object]) -> object:
    """Return the annotation as an object; `Any` if it is missing or cannot be resolved at run time."""
    if annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(holder, globalns=getattr(code, "__globals__", {}))["it"]
    except (AttributeError, NameError, SyntaxError, TypeError):
        return Any


def _accepts(hint: object, kind: type, *, is_batch: bool) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_accepts(choice, kind, is_batch=is_batch) for choice in get_args(hint))
    hinted = get_origin(hint) or hint
    if not is_batch:
        return _is_above(hinted, kind)
    items = get_args(hint)
    return _is_above(hinted, list) and (len(items) != 1 or _accepts(items[0], kind, is_batch=False))


def _is_above(hinted: object, kind: type) -> bool:
    """Whether a value of the class fits the annotation; true if only a type checker can tell."""
    if hinted is Any or not isinstance(hinted, type) or getattr(hinted, "_is_protocol", False):
        return True
    return issubclass(kind, hinted)


def _check_payload(hint: object, model: type[BaseModel] | None, place: str) -> None:
    """Compare the payload of an annotation such as `Message[Order]` with the model of the topic."""
    if get_origin(hint) is not Message:
        for part in get_args(hint):
            _check_payload(part, model, place)
        return
    (payload,) = get_args(hint)
    hinted = get_origin(payload) or payload
    if model is None:
        if isinstance(hinted, type) and issubclass(hinted, BaseModel):
            raise ConfigurationError(
                f"{place}: expects a {hinted.__name__}, but the topic has no payload model; "
                f"define it with payload={hinted.__name__}"
            )
    elif not _is_above(hinted, model):
        expected = inspect.formatannotation(payload)
        raise ConfigurationError(f"{place}: expects {expected}, but the topic's payload is a {model.__name__}")


def _mismatch(place: str, parameter: inspect.Parameter, context: type, *, is_batch: bool) -> str:
    wanted = f"(message: Message, ctx: {context.__name__})"
    if is_batch:
        wanted = f"(messages: Sequence[Message], contexts: Sequence[{context.__name__}])"
    annotation = parameter.annotation
    shown = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return f"{place}: parameter {parameter.name!r}: annotated as {shown}; a worker passes {wanted}"
