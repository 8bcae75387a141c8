"""Prints, as `cuobjdump -sass` does, the instructions of kernels in which a descriptor may stand:
disassemble_descriptors.py CUOBJDUMP NVDISASM OBJECT_OR_LIBRARY...

The disassembler takes most of the time of a look at all kernels. So it gets an instruction that
many kernels have once, as one of the first of them, and of an opcode of arithmetic, in which no
descriptor stands, one.
"""

import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ARITHMETIC = 1 << 8  # in the first word of an instruction; clear in opcodes of arithmetic
OPCODE = (1 << 12) - 1
WITHOUT_SCHEDULE = (1 << 41) - 1  # in the second word


def kernels(cubin):
    """The names of the kernels in an ELF file, and their code."""
    sections_at, size, count, names = struct.unpack_from("<40xQ10xHHH", cubin)
    sections = [struct.unpack_from("<I20xQQ", cubin, sections_at + i * size) for i in range(count)]
    for name, at, length in sections:
        start = sections[names][1] + name
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            yield name.removeprefix(".text."), cubin[at : at + length]


def main(cuobjdump, nvdisasm, *files):
    lines = {}  # of a kernel's name and architecture
    codes = {}  # of an architecture: an instruction's bytes and kernel, for each that differs
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            listed = subprocess.check_output([cuobjdump, "-lelf", Path(file).resolve()], text=True)
            subprocess.run(
                [cuobjdump, "-xelf", "all", Path(file).resolve()],
                cwd=folder, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            cubins = list(Path(folder).iterdir())
            if len(cubins) != len(listed.splitlines()):
                sys.exit(f"{file} holds several files of one name:\n{listed}")
            for path in cubins:
                architecture = path.suffixes[-2].removeprefix(".sm_")
                code = codes.setdefault(architecture, {})
                for name, text in kernels(path.read_bytes()):
                    lines[name, architecture] = []
                    for low, high in struct.iter_unpack("<QQ", text):
                        key = (low, high & WITHOUT_SCHEDULE) if low & ARITHMETIC else low & OPCODE
                        code.setdefault(key, (low, high, name))
    for architecture, code in codes.items():
        instructions = list(code.values())
        with tempfile.NamedTemporaryFile() as raw:
            raw.write(b"".join(struct.pack("<QQ", *words) for *words, _ in instructions))
            raw.flush()
            text = subprocess.check_output(
                [nvdisasm, "-b", f"SM{architecture}", raw.name], text=True
            )
        disassembled = [line for line in text.splitlines() if line.lstrip().startswith("/*")]
        if len(disassembled) != len(instructions):
            sys.exit(f"{nvdisasm}: {len(instructions)} instructions, {len(disassembled)} lines")
        for line, (*_, name) in zip(disassembled, instructions, strict=True):
            lines[name, architecture].append(line)
    for (name, _), of_kernel in lines.items():
        print(f"Function : {name}", *of_kernel, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
