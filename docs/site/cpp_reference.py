"""The directive `cpp-headers`: the public headers of the library, a section for each declaration.

    .. cpp-headers:: sparse_mla

shows the headers below winnow/sparse_mla, in the order of winnow/winnow.h. A header's comments are
plain text: paragraphs, items that begin with "- ", and formulas, whose lines are indented by two
more columns. A comment belongs to the declaration below it.
"""

import re
from pathlib import Path

import tree_sitter
import tree_sitter_cpp
from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))
DECLARATIONS = {
    "alias_declaration",
    "class_specifier",
    "declaration",
    "enum_specifier",
    "function_definition",
    "struct_specifier",
    "template_declaration",
}


def public_headers():
    """The headers that winnow.h includes, as paths below the folder winnow."""
    text = (ROOT / "winnow" / "winnow.h").read_text()
    headers = re.findall(r'^#include "winnow/(.*)"$', text, re.MULTILINE)
    return [header for header in headers if header != "core/version.h"]  # it is generated


def without_bodies(node):
    """The text of a declaration without function bodies and private members."""
    cuts = []

    def visit(node):
        if node.type == "function_definition":
            for child in node.children:
                if child.type in ("compound_statement", "field_initializer_list"):
                    cuts.append((child.start_byte, node.end_byte, b";"))
                    return
        if node.type == "lambda_expression":
            cuts.append((node.start_byte, node.end_byte, b" /* ... */"))
            return
        if node.type == "access_specifier" and node.text.startswith(b"private"):
            # Cuts up to the closing brace of the class.
            cuts.append((node.start_byte, node.parent.end_byte - 1, b"\n"))
        for child in node.children:
            visit(child)

    visit(node)
    text, begin = node.text, node.start_byte
    cuts.sort()
    parts, at = [], begin
    for start, end, instead in cuts:
        if start < at:
            continue  # inside the previous cut
        parts += [text[at - begin : start - begin].rstrip(), instead]
        at = end
    parts.append(text[at - begin :])
    return re.sub(r"\n\s*\n(?=};?$)", "\n", b"".join(parts).decode())


def name_of(node):
    """The name that a declaration declares."""
    if node.type == "template_declaration":
        return name_of(node.named_children[-1])
    while (inner := node.child_by_field_name("declarator")) is not None:
        node = inner
    named = node.child_by_field_name("name") or node
    return re.sub(r"^[&*\s]+|\(.*", "", named.text.decode(), flags=re.DOTALL)


def declarations(source):
    """(the header's own comment, [(namespace, name, comment, text)]) of a header."""
    about, found = None, []

    def walk(parent, namespace):
        nonlocal about
        comment = []
        for node in parent.children:
            if node.type == "comment":
                if comment and node.start_point[0] != comment[-1].end_point[0] + 1:
                    comment = []
                if found and not comment and node.start_point[0] == last_row(parent, node):
                    continue  # on the line of the previous declaration
                comment.append(node)
                continue
            if about is None:
                about = [c.text.decode() for c in comment]
                comment = []
            if node.type == "namespace_definition":
                name = node.child_by_field_name("name")
                if name is not None and "detail" not in name.text.decode():
                    walk(
                        node.child_by_field_name("body"),
                        "::".join(filter(None, [namespace, name.text.decode()])),
                    )
            elif node.type in DECLARATIONS and is_shown(node):
                beside = node.next_sibling
                after = ""
                while beside is not None and beside.type in (";", "comment"):
                    if beside.start_point[0] != node.end_point[0]:
                        break
                    after += (
                        beside.text.decode() if beside.type == ";" else f"  {beside.text.decode()}"
                    )
                    beside = beside.next_sibling
                above = comment
                if above and above[-1].end_point[0] + 1 < node.start_point[0]:
                    above = []
                found.append(
                    (namespace, name_of(node), [c.text.decode() for c in above],
                     without_bodies(node) + after)
                )  # fmt: skip
            comment = []

    # The parser does not expand macros, and takes these for types.
    source = re.sub(rb"\b(WINNOW_EXPORT|WINNOW_CACHE_FORMAT) (?!\n)", b"", source)
    walk(PARSER.parse(source).root_node, "")
    return about or [], found


def last_row(parent, comment):
    before = comment.prev_sibling
    while before is not None and before.type == ";":
        before = before.prev_sibling
    return before.end_point[0] if before is not None else -1


def is_shown(node):
    """Whether it is no forward declaration, specialisation or friend."""
    text = node.text.decode()
    if re.fullmatch(r"(class|struct) \w+;?", text) or text.startswith("template <>"):
        return False
    return not text.startswith("friend")


def prose(lines):
    """Nodes for the lines of a comment."""
    lines = [re.sub(r"^// ?", "", line) for line in lines]
    result, kind = [], None
    for line in lines:
        if not line.strip():
            kind = None
        elif line.startswith("  ") and kind == "item":
            result[-1][1].append(line.strip())
        elif line.startswith("  "):
            if kind == "formula":
                result[-1][1].append(line[2:])
            else:
                result.append(("formula", [line[2:]]))
            kind = "formula"
        elif line.startswith("- "):
            result.append(("item", [line[2:]]))
            kind = "item"
        elif kind == "text":
            result[-1][1].append(line)
        else:
            result.append(("text", [line]))
            kind = "text"
    made = []
    for kind, text in result:
        if kind == "formula":
            made.append(nodes.literal_block("\n".join(text), "\n".join(text), language="text"))
            continue
        paragraph = nodes.paragraph("", "", *inline(" ".join(text)))
        if kind == "text":
            made.append(paragraph)
        else:
            if not made or not isinstance(made[-1], nodes.bullet_list):
                made.append(nodes.bullet_list())
            made[-1] += nodes.list_item("", paragraph)
    return made


def inline(text):
    for part in re.split(r"(`[^`]+`)", text):
        if part.startswith("`"):
            yield nodes.literal(part[1:-1], part[1:-1])
        elif part:
            yield nodes.Text(part)


class CppHeaders(SphinxDirective):
    required_arguments = 1

    def run(self):
        folder = self.arguments[0]
        headers = [h for h in public_headers() if h.startswith(folder + "/")]
        if not headers:
            raise ExtensionError(f"cpp-headers: no public header is in {folder}")
        return [self.header(header) for header in headers]

    def section(self, key, title):
        section = nodes.section(ids=[nodes.make_id(key)], names=[key])
        section += nodes.title("", "", title)
        self.state.document.note_explicit_target(section)
        return section

    def header(self, header):
        path = ROOT / "winnow" / header
        self.env.note_dependency(str(path))
        about, found = declarations(path.read_bytes())
        key = f"winnow/{header}"
        section = self.section(key, nodes.literal(key, key))
        section += prose(about)
        seen = {}
        for namespace, name, comment, text in found:
            full = f"{namespace}::{name}"
            if full in seen:  # another overload
                parent = seen[full]
            else:
                short = full.removeprefix("winnow::")
                parent = seen[full] = self.section(f"{header} {full}", nodes.literal(short, short))
                index = addnodes.index(
                    entries=[("single", f"{full} (C++)", parent["ids"][0], "", None)]
                )
                parent += index
                section += parent
            parent += nodes.literal_block(text, text, language="cpp")
            parent += prose(comment)
        return section


def setup(app):
    app.add_directive("cpp-headers", CppHeaders)
    return {"version": "1", "parallel_read_safe": True}
