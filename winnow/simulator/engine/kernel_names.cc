// Which kernel a launch runs, by the program's own table of symbols.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <cxxabi.h>
#include <elf.h>

#include "winnow/simulator/engine/report.h"

extern "C" {
extern char __executable_start;  // of the linker
}

namespace winnow::simulator {
namespace {

std::map<std::int64_t, const void*>& kernels_of_launches() {
  static std::map<std::int64_t, const void*> all;
  return all;
}

template <class T>
std::span<const T> table_at(const std::vector<char>& file, std::size_t offset, std::size_t count) {
  return {reinterpret_cast<const T*>(file.data() + offset), count};
}

std::string symbol_of(const void* function) {
  std::ifstream in("/proc/self/exe", std::ios::binary);
  const std::vector<char> file{std::istreambuf_iterator<char>(in), {}};
  const auto address =
      static_cast<Elf64_Addr>(static_cast<const char*>(function) - &__executable_start);
  const Elf64_Ehdr& header = table_at<Elf64_Ehdr>(file, 0, 1).front();
  const auto sections = table_at<Elf64_Shdr>(file, header.e_shoff, header.e_shnum);
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_SYMTAB) continue;
    const char* const names = file.data() + sections[section.sh_link].sh_offset;
    for (const Elf64_Sym& symbol :
         table_at<Elf64_Sym>(file, section.sh_offset, section.sh_size / sizeof(Elf64_Sym))) {
      const bool is_function = ELF64_ST_TYPE(symbol.st_info) == STT_FUNC;
      if (is_function && symbol.st_value == address) return names + symbol.st_name;
    }
  }
  return "a kernel";  // of a program without symbols
}

std::string short_name(const std::string& symbol) {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  if (status != 0) return symbol;
  std::string name = demangled;
  std::free(demangled);
  constexpr std::string_view kUnnamed = "(anonymous namespace)::";
  for (std::size_t at = 0; (at = name.find(kUnnamed)) != std::string::npos;) {
    name.erase(at, kUnnamed.size());
  }
  name = name.substr(0, name.find_first_of("<("));
  return name.substr(name.find_last_of(": ") + 1);
}

}  // namespace

void note_launch(std::int64_t number, const void* kernel) {
  kernels_of_launches()[number] = kernel;
}

const std::string& name_of_kernel(const void* kernel) {
  static std::map<const void*, std::string> known;
  const auto [place, is_new] = known.try_emplace(kernel);
  if (is_new) place->second = short_name(symbol_of(kernel));
  return place->second;
}

std::string name_of_launch(std::int64_t number) {
  return "launch " + std::to_string(number) + " (" + name_of_kernel(kernels_of_launches()[number]) +
         ")";
}

}  // namespace winnow::simulator
