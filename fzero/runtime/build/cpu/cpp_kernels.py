"""Compiles subgraphs for the CPU: reduces Inductor's Python to one function per subgraph, and compiles the C++ kernels
of many subgraphs together into one library.

Inductor writes a module around each subgraph and compiles every kernel separately, at 0.7 s each, most of it for
headers. A process that loads the result has to import the whole compiler first. Here the kernels of many subgraphs are
one translation unit, and the loaded result is a library and a function that refer only to torch. This file knows
Inductor's output, but neither programs nor files.
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib.machinery
import importlib.util
import itertools
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fzero._compat import compat
from fzero.runtime.build.tracebacks import compiled


class NotPlain(Exception):
    """Inductor's code is more than a function that calls kernels. The text says what it contains."""


@dataclass(frozen=True)
class CppKernel:
    """A C++ function `kernel`: its source, and the types of its arguments."""

    source: str
    types: tuple[str, ...]


@dataclass(frozen=True)
class Plain:
    """The function of a subgraph, and its kernels by the names under which the function calls them."""

    call: ast.FunctionDef
    kernels: Mapping[str, CppKernel]


def parse(lowered: compat.InductorOutput, num_inputs: int, num_outputs: int, writes: Sequence[int]) -> Plain:
    """Parses Inductor's module as a function that calls kernels.

    Args:
        lowered: the module.
        num_inputs, num_outputs, writes: those of the graph that was lowered; Inductor may add to them.

    Raises:
        NotPlain: the module is something else: a graph with additional inputs, kernels that are not C++, names that are
            not torch's.
    """
    module = ast.parse(lowered.text)
    kernels = dict(filter(None, map(_kernel, module.body)))
    inputs, body = inputs_and_body(module)
    if (
        not isinstance(body[-1], ast.Return)
        or not isinstance(body[-1].value, ast.Tuple)
        # `text_of` moves the results into buffers before the only return statement. It would miss a second one.
        or sum(isinstance(n, ast.Return) for statement in body for n in ast.walk(statement)) != 1
    ):
        raise NotPlain("results of an unexpected form")
    signature = len(inputs), len(body[-1].value.elts), lowered.writes
    if signature != (num_inputs, num_outputs, tuple(sorted(writes))):
        raise NotPlain(
            f"inputs, outputs and writes {signature} where the graph has {num_inputs}, {num_outputs}, "
            f"{tuple(sorted(writes))}"
        )
    # The function is later run in a namespace that has only these names and those of torch, without the rest of
    # Inductor's module.
    _check_names(body, {*inputs, *kernels})
    return Plain(ast.FunctionDef("call", _arguments(inputs), body, [], type_params=[]), kernels)  # type: ignore[call-arg]


def inputs_and_body(module: ast.Module) -> tuple[list[str], list[ast.stmt]]:
    """Returns the names of the inputs of Inductor's function, and its statements after those that unpack the inputs."""
    found = [
        n
        for top in module.body
        for n in (top.body if isinstance(top, ast.ClassDef) and top.name == "Runner" else [top])
    ]
    calls = [n for n in found if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if len(calls) != 1:
        raise NotPlain(f"{len(calls)} functions")
    match calls[0].body:
        case [
            ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name("args")),
            ast.Expr(ast.Call(ast.Attribute(ast.Name("args"), "clear"))),
            *body,
        ]:
            return [n.id for n in names if isinstance(n, ast.Name)], body
    raise NotPlain("arguments of an unexpected form")


def _kernel(node: ast.stmt) -> tuple[str, CppKernel] | None:
    """Parses `name = async_compile.cpp_pybinding(types, source)`."""
    match node:
        case ast.Assign(
            targets=[ast.Name(name)], value=ast.Call(ast.Attribute(ast.Name("async_compile"), maker), [types_, source])
        ):
            if maker != "cpp_pybinding":
                raise NotPlain(f"kernels of the kind {maker}")
            kernel = CppKernel(ast.literal_eval(source), tuple(ast.literal_eval(types_)))
            # `library_source` renames the function by its name and a parenthesis. A second match would be renamed too,
            # although it may not be this function.
            if len(re.findall(r"\bkernel\s*\(", kernel.source)) != 1:
                raise NotPlain("a kernel of several functions")
            return name, kernel
    return None


def _check_names(body: Sequence[ast.stmt], known: set[str]) -> None:
    nodes = [n for statement in body for n in ast.walk(statement)]
    made = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    unknown = used - made - known - set(compat.inductor_names()) - set(dir(builtins))
    externs = {
        n.attr
        for n in nodes
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "extern_kernels"
    }
    unknown |= {f"extern_kernels.{name}" for name in externs if not compat.is_extern(name)}
    if unknown:
        raise NotPlain(f"names that are not torch's: {', '.join(sorted(unknown))}")


def _arguments(names: Sequence[str]) -> ast.arguments:
    return ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])


def text_of(
    plain: Plain, numbers: Mapping[CppKernel, int], num_args: int, into: Sequence[int], num_outputs: int
) -> str:
    """Returns the Python source of the function as an op of a program calls it.

    Args:
        plain: a function whose inputs are `num_args` arguments followed by constants.
        numbers: the numbers of the kernels in their library.
        into: which of the `num_outputs` results it is given contiguous buffers for. If there are any, it takes a
            keyword argument `into` with an entry for every result. The results are computed in these buffers: a buffer
            replaces the one that Inductor would have allocated or, if that is not possible, the result is copied to it.

    The source defines `call`, whose last arguments are the constants: they become its defaults.
    """
    inputs = [a.arg for a in plain.call.args.args]
    args, constants = inputs[:num_args], inputs[num_args:]
    body = copy.deepcopy(list(plain.call.body))
    last = body.pop()
    assert isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple)
    results = list(last.value.elts)
    places = [_allocation(body, value) for value in results]
    for i in into:
        buffer, place = ast.parse(f"into[{i}]", mode="eval").body, places[i]
        # If two results share an allocation, it cannot become the buffer of either.
        if place is not None and sum(p is place for p in places) == 1:
            assert isinstance(place.value, ast.Call)
            shape, stride = (ast.unparse(a) for a in place.value.args[:2])
            place.value = ast.parse(f"reinterpret_tensor(into[{i}], {shape}, {stride}, 0)", mode="eval").body
        else:
            # The result is a view of a larger allocation, or an input. It is computed where Inductor put it, and then
            # copied.
            body.append(ast.Expr(ast.Call(ast.Attribute(buffer, "copy_", ast.Load()), [results[i]], [])))
        results[i] = buffer
    value = results[0] if num_outputs == 1 else ast.Tuple(results, ast.Load()) if results else None
    names = _arguments([*args, *(["into"] if into else []), *constants])
    call = ast.FunctionDef("call", names, [*body, ast.Return(value)], [], type_params=[])  # type: ignore[call-arg]
    rename = {name: f"kernel_{numbers[kernel]}" for name, kernel in plain.kernels.items()}
    for node in ast.walk(call):
        if isinstance(node, ast.Name) and node.id in rename:
            node.id = rename[node.id]
    return ast.unparse(ast.fix_missing_locations(call))


def _allocation(body: Sequence[ast.stmt], value: ast.expr) -> ast.Assign | None:
    """Returns the statement that allocates the memory of a result, if the result is all of that memory and contiguous.
    A buffer may have been used for other values before."""
    numel = None
    # Follows a result backwards through its renames and views to the statement that allocates its memory.
    while True:
        match value:
            case ast.Call(ast.Name("reinterpret_tensor"), [ast.Name(name), shape, stride, ast.Constant(0)]):
                sizes, strides = ast.literal_eval(shape), ast.literal_eval(stride)
                if numel is None and not _is_contiguous(sizes, strides):
                    return None
                if numel not in (None, math.prod(sizes)):
                    return None
                numel = math.prod(sizes)
            case ast.Name(name):
                pass
            case _:
                return None
        found = [
            s
            for s in body
            if isinstance(s, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in s.targets)
        ]
        # A name that is assigned twice may refer to different memory at the time when it is returned.
        if len(found) != 1 or len(found[0].targets) != 1:
            return None
        match found[0].value:
            case ast.Call(ast.Name("empty_strided_cpu"), [shape, stride, _]):
                sizes, strides = ast.literal_eval(shape), ast.literal_eval(stride)
                whole = numel in (None, math.prod(sizes)) and _span(sizes, strides) == math.prod(sizes)
                return found[0] if whole and (numel is not None or _is_contiguous(sizes, strides)) else None
            case other:
                value = other


def _is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns the number of elements from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if math.prod(sizes) else 0


def library_source(kernels: Sequence[CppKernel]) -> str:
    """Returns one C++ file with all kernels and a Python function for each: `kernel_0`, `kernel_1`, …"""
    includes: dict[str, None] = {}
    parts, table = [], []
    for i, kernel in enumerate(kernels):
        lines = kernel.source.splitlines()
        includes.update(dict.fromkeys(line for line in lines if line.startswith("#include")))
        # Inductor's kernels are `extern "C"`: with one name they would be one function, despite their namespaces.
        rest = re.sub(
            r"\bkernel\s*(?=\()", f"kernel_{i}", "\n".join(line for line in lines if not line.startswith("#include"))
        )
        parts.append(f"namespace fzero_{i} {{\n{rest}\n}}")
        values = ", ".join(f"argument<{t.replace('const ', '')}>(args[{n}])" for n, t in enumerate(kernel.types))
        table.append(_BINDING.format(i=i, count=len(kernel.types), values=values))
    methods = "\n".join(
        f'    {{"kernel_{i}", (PyCFunction)(void (*)(void))call_{i}, METH_FASTCALL, ""}},' for i in range(len(kernels))
    )
    return "\n".join([_HEAD, *includes, *parts, _ARGUMENTS, *table, _MODULE.format(methods=methods)])


_HEAD = """#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <tuple>
#include <type_traits>"""

_ARGUMENTS = """
static void* (*data_pointer)(PyObject*);

template <typename T> static inline T argument(PyObject* x) {
    static_assert(std::is_pointer_v<T>, "a kernel takes tensors and whole numbers");
    return static_cast<T>(data_pointer(x));
}

template <> inline int64_t argument<int64_t>(PyObject* x) {
    auto value = PyLong_AsLongLong(x);
    if (value == -1 && PyErr_Occurred()) throw std::runtime_error("expected a whole number");
    return value;
}

// A kernel runs without the interpreter's lock: what streams and copies beside it is Python, too.
// Its arguments are read before.
struct Unlocked {
    PyThreadState* const state = PyEval_SaveThread();
    // A thread that outlives the interpreter is ended by unwinding it.
    ~Unlocked() noexcept(false) { PyEval_RestoreThread(state); }
};
"""

_BINDING = """
static PyObject* call_{i}(PyObject*, PyObject* const* args, Py_ssize_t count) {{
    if (count != {count}) {{
        PyErr_SetString(PyExc_TypeError, "kernel_{i} takes {count} arguments");
        return nullptr;
    }}
    try {{
        std::tuple values{{{values}}};
        Unlocked unlocked;
        std::apply(fzero_{i}::kernel_{i}, values);
    }} catch (std::exception const& error) {{
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }}
    Py_RETURN_NONE;
}}"""

_MODULE = """
static PyObject* attach(PyObject*, PyObject* address) {{
    data_pointer = reinterpret_cast<void* (*)(PyObject*)>(PyLong_AsVoidPtr(address));
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}}

static PyMethodDef methods[] = {{
    {{"attach", attach, METH_O, ""}},
{methods}
    {{nullptr, nullptr, 0, nullptr}}}};

static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "fzero_kernels", nullptr, -1, methods}};

PyMODINIT_FUNC PyInit_fzero_kernels(void) {{
    return PyModule_Create(&module);
}}
"""


_loaded = itertools.count()


def load_library(path: Path) -> types.ModuleType:
    """Loads the kernels of a library. The loader ignores data that follows the library in its file."""
    # A unique name: for a known name, Python would add this library's functions to the module loaded before.
    name = f"fzero_{next(_loaded)}.fzero_kernels"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.attach(compat.data_pointer_function())
    return module


def function_of(
    name: str, text: str, library: types.ModuleType | None, constants: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Returns the function whose source `text_of` wrote, with the kernels of a library. Tracebacks show its lines."""
    namespace = {**compat.inductor_names(), **(vars(library) if library else {})}
    call = compiled(text, f"function {name}", namespace, "call")
    # The literals of the graph are the last arguments. As defaults they cost nothing per call, and the code does not
    # contain their values.
    call.__defaults__ = tuple(constants) or None
    return call
