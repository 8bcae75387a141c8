// The program of `make demo`: `winnow demo` as it is without options, for those who do not want to
// wait for the other commands, with every operation's cases and benchmarks, to be compiled.
#include <iostream>

#include "tools/winnow/demo/demo.h"
#include "tools/winnow/program.h"
#include "tools/winnow/progress.h"

int main() {
  return winnow::cli::run_program([] {
    winnow::demo::DemoOptions options;
    options.default_document = WINNOW_SOURCE_DOCUMENT;
    options.progress = winnow::cli::progress_wanted();
    return winnow::demo::run_demo(options, std::cout, std::cerr);
  });
}
