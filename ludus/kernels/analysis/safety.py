"""Safety rules: what code of a kernel has no need of.

Names are looked up in the syntax tree, so comments and strings do not count; the bodies of macros
do. A name that the source itself defines is not the system's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ludus.kernels.analysis.findings import Finding
from ludus.kernels.analysis.tree import (
    LOOPS,
    Function,
    Node,
    Source,
    arguments_of,
    called,
    condition_of,
    declared_name,
    text,
    walk,
)

NAMES = {
    "system-call": """
        system popen pclose fork vfork execl execlp execle execv execve execvp execvpe posix_spawn
        posix_spawnp syscall ptrace setuid setgid prctl pthread_create
    """,
    "file-access": """
        fopen freopen fdopen openat creat unlink rmdir mkdir chmod chown symlink readlink opendir
        ifstream ofstream fstream filebuf tmpfile mkstemp getenv setenv putenv unsetenv filesystem
        sendfile fscanf fwrite fread
    """,
    "network-access": """
        socket getaddrinfo gethostbyname inet_addr inet_pton inet_aton recvfrom sendto sockaddr_in
        curl_easy_init
    """,
    "dynamic-loading": """
        dlopen dlsym dlmopen LoadLibrary LoadLibraryA LoadLibraryW GetProcAddress mprotect
        cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuLibraryLoadData
        cuLibraryLoadFromFile cuLinkCreate cudaLibraryLoadData nvrtcCompileProgram
    """,
    "foreign-memory": """
        mmap shm_open shmget process_vm_readv process_vm_writev cudaIpcOpenMemHandle
        cudaIpcGetMemHandle cuIpcOpenMemHandle cudaHostRegister cudaImportExternalMemory
        cuMemImportFromShareableHandle
    """,
}
"""Rule to names that mean nothing else, wherever they stand."""
CALLS = {
    "system-call": "kill exit raise signal clone wait waitpid",
    "file-access": "open read write remove rename access",
    "network-access": "connect bind listen accept send recv",
}
"""Rule to names that are common words: free functions that are called and not defined here."""
RULE_OF = {name: rule for rule, names in NAMES.items() for name in names.split()}
RULE_OF_CALL = {name: rule for rule, names in CALLS.items() for name in names.split()}
HOST_HEADERS = re.compile(
    r"unistd|sys/|dlfcn|fcntl|spawn|signal|pthread|thread$|netinet|arpa/|netdb|curl/|fstream|"
    r"filesystem|dirent|windows|winsock|mmap|boost/|cuda\.h$|nvrtc"
)
ALLOCATORS = {
    "cudaMalloc": "cudaFree", "cudaMallocManaged": "cudaFree", "cudaMallocHost": "cudaFreeHost",
    "cudaHostAlloc": "cudaFreeHost", "cudaMallocAsync": "cudaFreeAsync",
    "cudaMallocPitch": "cudaFree", "cudaStreamCreate": "cudaStreamDestroy",
    "cudaEventCreate": "cudaEventDestroy",
}  # fmt: skip
ENDS = ("return_statement", "goto_statement", "throw_statement", "co_return_statement")
IDENTIFIERS = ("identifier", "type_identifier", "field_identifier", "namespace_identifier")


def place(node: Node) -> tuple[int, int]:
    """Line and column of a node, from 1."""
    return node.start_point[0] + 1, node.start_point[1] + 1


def finding(node: Node, rule: str, reason: str) -> Finding:
    """A finding at a node."""
    return Finding(*place(node), rule, reason[:300])


def safety_findings(source: Source) -> Iterator[Finding]:
    """The findings of all safety rules."""
    yield from _hidden(source)
    yield from _names(source)
    yield from _preprocessor(source)
    for node in source.of_type("gnu_asm_expression", "asm_statement"):
        yield finding(node, "inline-assembly", f"{text(node)[:60]} is assembly")
    for node in source.of_type(*LOOPS):
        yield from _loop(node)
    for node in source.of_type("goto_statement"):
        yield from _goto(node)
    yield from _leaks(source)


def _hidden(source: Source) -> Iterator[Finding]:
    whole = source.data.decode("utf-8", "replace")
    for pattern, what in (
        (r"\w\\\r?\n\w", "a word is cut in two by a line break"),
        (r"\w\?\?/\r?\n\w", "a word is cut in two by a trigraph"),
        (r"\w*\\u[0-9a-fA-F]{4}\w*|\w*\\U[0-9a-fA-F]{8}\w*", "a name has escaped letters"),
        (r"[\u200b-\u200f\u202a-\u202e\u2060-\u2069]", "an invisible character"),
    ):
        for match in re.finditer(pattern, whole):
            if what.startswith("a name") and _in_literal(source, match.start(), whole):
                continue
            line = whole.count("\n", 0, match.start()) + 1
            column = match.start() - whole.rfind("\n", 0, match.start())
            yield Finding(line, column, "hidden-name", what)


def _in_literal(source: Source, offset: int, whole: str) -> bool:
    start = len(whole[:offset].encode())
    node = source.root.descendant_for_byte_range(start, start + 1)
    return node is not None and (
        node.type in ("comment", "escape_sequence", "string_content") or "literal" in node.type
    )


def _names(source: Source) -> Iterator[Finding]:
    defined = {function.name for function in source.functions}
    defined |= {
        text(declared_name(node.child_by_field_name("declarator")))
        for node in source.of_type("parameter_declaration", "init_declarator", "declaration")
        if node.child_by_field_name("declarator") is not None
    }
    for node in source.of_type(*IDENTIFIERS):
        name = text(node)
        if rule := RULE_OF.get(name):
            if name not in defined and not _is_member(node):
                yield finding(node, rule, f"{name} is used")
        elif rule := RULE_OF_CALL.get(name):
            call = node.parent
            while call is not None and call.type == "qualified_identifier":
                call = call.parent
            if (
                call is not None
                and call.type == "call_expression"
                and name not in defined
                and called(call) == name
                and not _is_member(node)
            ):
                yield finding(node, rule, f"{name} is called")
    for node in source.of_type("preproc_def", "preproc_function_def"):
        body = text(node.child_by_field_name("value"))
        for name in re.findall(r"[A-Za-z_]\w*", body):
            rule = RULE_OF.get(name) or (RULE_OF_CALL.get(name) if f"{name}(" in body else None)
            if rule and name not in defined:
                macro = text(node.child_by_field_name("name"))
                yield finding(node, rule, f"the macro {macro} stands for {name}")
            elif name in ("asm", "__asm__", "__asm"):
                yield finding(node, "inline-assembly", "a macro holds assembly")


def _is_member(node: Node) -> bool:
    parent = node.parent
    return (
        parent is not None
        and parent.type == "field_expression"
        and parent.child_by_field_name("field") == node
    )


def _preprocessor(source: Source) -> Iterator[Finding]:
    for node in source.of_type("preproc_include"):
        path = node.child_by_field_name("path")
        name = text(path).strip('<>"')
        if path is not None and path.type not in ("system_lib_string", "string_literal"):
            yield finding(node, "include-path", f"the macro {name[:60]} names the file")
        elif name.startswith(("/", "~")) or ".." in name.split("/") or "\\" in name or ":" in name:
            yield finding(node, "include-path", f"{name[:100]} is a path of the machine")
        elif HOST_HEADERS.match(name):
            yield finding(node, "host-header", f"{name[:100]} is a header of the host")
    for node in source.of_type("preproc_def", "preproc_function_def"):
        body = text(node.child_by_field_name("value"))
        macro = text(node.child_by_field_name("name"))
        if re.search(r"##|%:%:", body):
            yield finding(node, "token-pasting", f"the macro {macro} pastes tokens")
        if macro in KEYWORDS:
            yield finding(node, "hidden-name", f"the macro {macro} gives a keyword another meaning")
    for node in source.of_type("preproc_call"):
        directive = text(node.child_by_field_name("directive"))
        if re.fullmatch(r"#\s*line", directive):
            yield finding(node, "line-directive", "#line changes places in messages")


KEYWORDS = frozenset(
    {"if", "for", "while", "return", "int", "float", "else", "const", "static", "break",
     "__syncthreads", "threadIdx", "blockIdx", "asm"}
)  # fmt: skip


# Loops


def _loop(node: Node) -> Iterator[Finding]:
    condition, body = condition_of(node), node.child_by_field_name("body")
    if body is None:
        return
    if _always_true(node, condition):
        if not _leaves(body):
            yield finding(node, "endless-loop", "the condition is always true, and nothing ends it")
        return
    if condition is None:
        return
    if any(part.type == "call_expression" for part in walk(condition)):
        if not any(part.type.endswith("_statement") for part in body.named_children):
            calls = [part for part in walk(condition) if part.type == "call_expression"]
            if any(called(call).startswith("atomic") for call in calls):
                yield finding(node, "spin-wait", f"{text(condition)[:60]} is asked until it holds")
        return
    memory = ("subscript_expression", "pointer_expression", "field_expression")
    if any(part.type in memory for part in walk(condition)):
        empty = not any(part.is_named for part in body.children) or text(body).strip() == ";"
        if empty and node.type != "for_statement":
            yield finding(node, "spin-wait", f"{text(condition)[:60]} is asked until it holds")
        return
    names = {text(part) for part in walk(condition) if part.type == "identifier"}
    changed = _changed(body) | _changed(condition)
    if update := node.child_by_field_name("update"):
        changed |= _changed(update)
    if names and not names & changed and not _leaves(body):
        reason = f"nothing in the loop changes {', '.join(sorted(names))}"
        yield finding(node, "endless-loop", reason)
    elif node.type == "for_statement" and (reason := _runs_away(node, condition)):
        yield finding(node, "endless-loop", reason)


def _goto(node: Node) -> Iterator[Finding]:
    """An unconditional jump back."""
    label = text(node.child_by_field_name("label"))
    current: Node | None = node
    while current is not None and current.type not in ("function_definition", *BRANCHING):
        before = current.prev_named_sibling
        while before is not None:
            if any(part.type == "return_statement" for part in walk(before)):
                return
            target = before.child_by_field_name("label")
            if before.type == "labeled_statement" and text(target) == label:
                yield finding(node, "endless-loop", f"goto {label} goes back in any case")
                return
            before = before.prev_named_sibling
        current = current.parent


BRANCHING = ("if_statement", "switch_statement", *LOOPS)


def _always_true(node: Node, condition: Node | None) -> bool:
    if condition is None:
        return node.type == "for_statement"
    told = text(condition).strip("() ")
    if condition.type == "true" or re.fullmatch(r"[1-9]\d*", told):
        return True
    sides = re.fullmatch(r"(\w+)\s*(==|<=|>=)\s*(\w+)", told)
    return sides is not None and sides[1] == sides[3]


def _leaves(body: Node) -> bool:
    """True if a statement ends the loop that has this body."""
    waiting = [(body, False, False)]
    while waiting:
        node, in_loop, in_switch = waiting.pop()
        if node.type in ENDS:
            return True
        if node.type == "break_statement" and not in_loop and not in_switch:
            return True
        if node.type == "call_expression" and called(node) in ("__trap", "assert", "__exit"):
            return True
        if node.type == "lambda_expression":
            continue
        nested = in_loop or (node.type in LOOPS and node != body)
        switch = in_switch or node.type == "switch_statement"
        waiting.extend((child, nested, switch) for child in node.children)
    return False


def _changed(node: Node) -> set[str]:
    """Names that are assigned, incremented, or passed by address or to a function."""
    found: set[str] = set()
    for part in walk(node):
        target = None
        if part.type == "assignment_expression":
            target = part.child_by_field_name("left")
        elif part.type == "update_expression" or part.type == "pointer_expression":
            target = part.child_by_field_name("argument")
        elif part.type == "call_expression":
            found |= {text(item) for item in arguments_of(part) if item.type == "identifier"}
        elif part.type == "gnu_asm_output_operand":
            target = part.child_by_field_name("value")
        elif part.type == "binary_expression" and ">>" in text(part):  # a stream reads it
            target = part.child_by_field_name("right")
        while target is not None and target.type in PARTS:  # `a[i] = 0` changes a, not i
            target = target.child_by_field_name("argument") or target.named_children[0]
        if target is not None:
            found |= {text(item) for item in walk(target) if item.type == "identifier"}
    return found


PARTS = ("subscript_expression", "field_expression", "parenthesized_expression")


def _runs_away(node: Node, condition: Node) -> str:
    """The reason why a counting loop never ends; empty if it ends."""
    update = node.child_by_field_name("update")
    if update is None or condition.type != "binary_expression":
        return ""
    match = re.fullmatch(r"(?:(\+\+|--)(\w+)|(\w+)(\+\+|--)|(\w+)\s*([-+*]=)\s*\w+)", text(update))
    if match is None:
        return ""
    name = match[2] or match[3] or match[5]
    up = (match[1] or match[4] or match[6])[0] in "+*"
    operator = text(condition.child_by_field_name("operator"))
    left, right = (condition.child_by_field_name(side) for side in ("left", "right"))
    if text(left) != name and text(right) == name:
        operator = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(operator, operator)
    elif text(left) != name:
        return ""
    if name in _changed(node.child_by_field_name("body") or node):
        return ""
    if (up and operator in (">", ">=")) or (not up and operator in ("<", "<=")):
        return f"{name} moves away from the end of the loop"
    start = node.child_by_field_name("initializer")
    unsigned = re.match(r"(unsigned|size_t|uint\w*)\b", text(start)) if start else None
    if unsigned and operator == ">=" and text(right if text(left) == name else left) == "0":
        return f"{name} is unsigned, so it is never below 0"
    return ""


# Leaks


def _leaks(source: Source) -> Iterator[Finding]:
    freed: set[tuple[str, str]] = set()
    returned = {
        text(part)
        for node in source.of_type("return_statement")
        for part in walk(node)
        if part.type == "identifier"
    }
    for node in source.of_type("call_expression"):
        for argument in arguments_of(node)[:1]:
            freed.add((called(node), text(argument).strip("&")))
    for node in source.of_type("call_expression"):
        name, arguments = called(node), arguments_of(node)
        if name in ALLOCATORS and arguments:
            target = re.sub(r"^\((?:void|\w+)\s*\*\*\)\s*", "", text(arguments[0])).strip("& ()")
            if (ALLOCATORS[name], target) not in freed and not _handed_on(returned, target):
                yield finding(node, "leak", f"{ALLOCATORS[name]} is not called for {target[:60]}")
    for function in source.functions:
        yield from _leaks_of(function)


def _leaks_of(function: Function) -> Iterator[Finding]:
    deleted = {
        text(node.named_children[-1])
        for node in walk(function.body)
        if node.type == "delete_expression" and node.named_children
    }
    deleted |= {
        text(arguments_of(node)[0])
        for node in walk(function.body)
        if node.type == "call_expression" and called(node) == "free" and arguments_of(node)
    }
    returned = {
        text(part)
        for node in walk(function.body)
        if node.type == "return_statement"
        for part in walk(node)
        if part.type == "identifier"
    }
    for node in walk(function.body):
        is_new = node.type == "new_expression" and node.child_by_field_name("placement") is None
        is_malloc = node.type == "call_expression" and called(node) in ("malloc", "calloc")
        if not (is_new or is_malloc):
            continue
        owner = node.parent
        while owner is not None and owner.type in ("cast_expression", "parenthesized_expression"):
            owner = owner.parent
        name = ""
        if owner is not None and owner.type == "init_declarator":
            name = text(declared_name(owner.child_by_field_name("declarator")))
        elif owner is not None and owner.type == "assignment_expression":
            name = text(owner.child_by_field_name("left"))
        if owner is not None and owner.type == "return_statement":
            continue
        if name not in deleted | returned:
            what = "new" if is_new else called(node)
            reason = f"nothing in {function.name} frees what {what} gives"
            yield finding(node, "leak", reason)


def _handed_on(returned: set[str], name: str) -> bool:
    """True if a name is a member, or is returned: another function may free it."""
    return not re.fullmatch(r"\w+", name) or name in returned
