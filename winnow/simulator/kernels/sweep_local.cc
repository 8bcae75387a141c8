#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>
#include "winnow/simulator/kernels/expert_parallel_simulation.h"
namespace winnow::expert_parallel {
testing::Operation all_to_all_operation();
testing::Operation low_latency_operation();
testing::Operation notify_operation();
testing::Operation layout_operation();
}
using namespace winnow;
int main(int, char** argv) {
  std::ifstream in(argv[1]);
  const int ranks = std::atoi(argv[2]), blocks = std::atoi(argv[3]);
  for (std::string line; std::getline(in, line);) {
    std::vector<std::string> f;
    std::stringstream s(line);
    for (std::string x; std::getline(s, x, '\t');) f.push_back(x);
    std::fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      expert_parallel::set_device(ranks, blocks);
      winnow::testing::Operation op = f[0] == "a2a" ? expert_parallel::all_to_all_operation() : f[0] == "ll" ? expert_parallel::low_latency_operation() : f[0] == "notify" ? expert_parallel::notify_operation() : expert_parallel::layout_operation();
      simulator::Plant plant;
      plant.file = f[3]; plant.text = f[4]; plant.below = std::atoi(f[5].c_str());
      plant.action = f[6] == "drop" ? simulator::Plant::Action::drop : f[6] == "add" ? simulator::Plant::Action::add : simulator::Plant::Action::delay;
      plant.addend = std::atoi(f[7].c_str());
      std::string out;
      try {
        simulator::plant(plant, WINNOW_SOURCE_DIR);
        simulator::settings().multiprocessors = ranks * blocks;
        const auto got = simulator::simulate(op, f[1], simulator::parse_schedule(f[2]), ranks * blocks);
        std::string text = got.report;
        for (char& c : text) if (c == '\n') c = ' ';
        out = std::to_string(simulator::plant_hits()) + " hits: " + (got.failed.empty() ? "NOT FOUND" : got.failed + " | " + text.substr(0, 400));
      } catch (const std::exception& error) { out = std::string("exception ") + error.what(); }
      std::printf("%s\t%s:%s\t%s %s\t%s\n", f[1].c_str(), f[3].c_str(), f[8].c_str(), f[6].c_str(), f[7].c_str(), out.c_str());
      std::fflush(stdout);
      _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    if (status != 0) std::printf("%s\t%s:%s\t%s %s\tdied %d\n", f[1].c_str(), f[3].c_str(), f[8].c_str(), f[6].c_str(), f[7].c_str(), status);
  }
}
