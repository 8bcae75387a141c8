// Trains a language model with sparse attention in the three phases of DeepSeek-V3.2: the model
// with full attention, then the indexer alone (warm-up), then both with the rows that the indexer
// chooses. README.md explains the steps.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gradient_check.h"
#include "model.h"
#include "plot.h"
#include "text.h"
#include <CLI/CLI.hpp>

namespace {

using winnow::DType;
using winnow::Tensor;

struct Options {
  std::string device = "cpu", text = TRAIN_INDEXER_TEXT, plot = "train_indexer.svg", dtype;
  std::int64_t dense = 200, warm_up = 200, sparse = 200, every = 25, seed = 1;
  std::optional<std::int64_t> tokens, heads, width, topk, index_heads, index_width;
  double rate = 0.2, indexer_rate = 0.5;
  bool fast = false, check = false, gradient_check = false;
};

void add_options(CLI::App& app, Options& o) {
  app.add_option("--device", o.device, "the device")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--text", o.text, "the training text: a file, or a folder of sources");
  app.add_option("--plot", o.plot, "the SVG file to write");
  const auto add_size = [&](const char* name, auto& size, const char* help) {
    app.add_option(name, size, help)->check(CLI::PositiveNumber);
  };
  const auto add_steps = [&](const char* name, std::int64_t& steps, const char* help) {
    app.add_option(name, steps, help)->check(CLI::NonNegativeNumber);
  };
  add_steps("--dense", o.dense, "steps of the model with full attention");
  add_steps("--warm-up", o.warm_up, "steps of the indexer alone");
  add_steps("--sparse", o.sparse, "steps of both with sparse attention");
  add_size("--every", o.every, "steps from one printed line to the next");
  add_size("--tokens", o.tokens, "tokens of a step (cpu 128, cuda 4096)");
  add_size("--heads", o.heads, "heads of the attention (cpu 4, cuda 64)");
  add_size("--width", o.width, "width of the model (cpu 64, cuda 256)");
  add_size("--topk", o.topk, "rows that a query attends to (cpu 32, cuda 1024)");
  add_size("--index-heads", o.index_heads, "heads of the indexer (cpu 4, cuda 8)");
  app.add_option("--index-width", o.index_width, "columns of an indexer's head (64)")
      ->check(CLI::IsMember({64, 128}));
  app.add_option("--dtype", o.dtype, "dtype of attention and indexer (cpu f32, cuda bf16)")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--rate", o.rate, "learning rate of the model");
  app.add_option("--indexer-rate", o.indexer_rate, "learning rate of the indexer");
  app.add_option("--seed", o.seed, "random seed of the weights and of the places in the text");
  app.add_flag("--fast", o.fast, "add gradients in any order: repeats differ in the last bits");
  app.add_flag("--gradient-check", o.gradient_check, "first compare with finite differences");
  app.add_flag("--check", o.check, "exit with 1 unless the losses fall");
}

std::unique_ptr<Machine> make_machine(const std::string& device) {
  if (device == "cpu") return make_host_machine();
#if TRAIN_INDEXER_WITH_CUDA
  if (winnow::gpus().gpus.empty()) {
    throw std::invalid_argument("--device cuda: " + winnow::gpus().reason);
  }
  return make_cuda_machine();
#else
  throw std::invalid_argument("--device cuda: built without CUDA");
#endif
}

ModelShape choose_shape(const Options& options) {
  ModelShape shape;
  if (options.device == "cuda") {
    shape = {.tokens = 4096, .heads = 64, .width = 256, .topk = 1024};
    shape.index_heads = 8;
    shape.dtype = DType::bf16;
  }
  shape.tokens = options.tokens.value_or(shape.tokens);
  shape.heads = options.heads.value_or(shape.heads);
  shape.width = options.width.value_or(shape.width);
  shape.topk = options.topk.value_or(shape.topk);
  shape.index_heads = options.index_heads.value_or(shape.index_heads);
  shape.index_width = options.index_width.value_or(shape.index_width);
  if (!options.dtype.empty()) shape.dtype = options.dtype == "f32" ? DType::f32 : DType::bf16;
  shape.deterministic = !options.fast;
  return shape;
}

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

struct Curves {
  std::vector<double> language, kl, recall, milliseconds;  // of every step; NaN: not measured
};

double mean(std::span<const double> values) {
  double sum = 0, count = 0;
  for (const double value : values) {
    if (std::isnan(value)) continue;
    sum += value;
    ++count;
  }
  return count > 0 ? sum / count : kNone;
}

std::string number(double value, int digits) {
  if (std::isnan(value)) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

enum class Phase { dense, warm_up, sparse };
constexpr const char* kNames[] = {"dense", "warm-up", "sparse"};

// Runs one step over a piece of the text. `measure`: computes the recall too.
void train_once(Phase phase, Model& model, Machine& machine, const winnow::ConstTensorView& piece,
                const Options& options, bool measure, Curves& curves) {
  const auto start = std::chrono::steady_clock::now();
  double kl = kNone, recall = kNone;
  model.project(piece);
  if (phase != Phase::dense) model.project_indexer();
  if (phase == Phase::sparse) model.choose();
  const double language = model.predict(phase == Phase::sparse);
  if (phase != Phase::warm_up) model.learn();
  if (phase != Phase::dense) kl = model.teach();
  // All gradients have been computed before any weight changes.
  if (phase != Phase::warm_up) {
    for (Parameter* parameter : model.main()) parameter->update(machine, options.rate);
  }
  if (phase != Phase::dense) {
    for (Parameter* parameter : model.indexer()) parameter->update(machine, options.indexer_rate);
  }
  machine.wait();
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  if (measure && phase != Phase::dense) {
    model.choose();
    recall = model.recall();
  }
  curves.language.push_back(language);
  curves.kl.push_back(kl);
  curves.recall.push_back(recall);
  curves.milliseconds.push_back(time.count());
}

struct Change {
  double first, last;
};

// Means over the first and the last quarter of steps [begin, end). Single steps cannot be compared,
// since each has another piece of text.
Change change(std::span<const double> curve, std::size_t begin, std::size_t end) {
  const std::size_t quarter = (end - begin + 3) / 4;
  return {mean(curve.subspan(begin, quarter)), mean(curve.subspan(end - quarter, quarter))};
}

int train(const Options& options, const ModelShape& shape, const Tensor& text, Machine& machine) {
  if (text.numel() <= shape.tokens) throw std::invalid_argument("--text: shorter than --tokens");
  Model model(machine, shape, static_cast<std::uint64_t>(options.seed));
  std::printf("%s, %lld bytes; %lld tokens a step, %lld heads, topk %lld, %s on %s\n\n",
              options.text.c_str(), static_cast<long long>(text.numel()),
              static_cast<long long>(shape.tokens), static_cast<long long>(shape.heads),
              static_cast<long long>(shape.topk), std::string(to_string(shape.dtype)).c_str(),
              to_string(machine.device()).c_str());
  std::printf("phase     step  language  indexer KL  recall  ms/step\n");

  std::mt19937_64 random(static_cast<std::uint64_t>(options.seed));
  const std::int64_t steps[] = {options.dense, options.warm_up, options.sparse};
  std::vector<std::pair<std::string, std::size_t>> phases;
  Curves curves;
  for (const Phase phase : {Phase::dense, Phase::warm_up, Phase::sparse}) {
    const int index = static_cast<int>(phase);
    phases.emplace_back(kNames[index], curves.language.size());
    for (std::int64_t step = 0; step < steps[index]; ++step) {
      const bool print = step % options.every == 0 || step == steps[index] - 1;
      const std::int64_t places = text.numel() - shape.tokens;
      const auto place = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(places));
      train_once(phase, model, machine, text.view().slice(0, place, place + shape.tokens + 1),
                 options, print, curves);
      if (!print) continue;
      // The steps since the previous line.
      const auto since = static_cast<std::size_t>(step == 0 ? 1 : (step - 1) % options.every + 1);
      const auto recent = [since](const std::vector<double>& curve, int digits) {
        return number(mean(std::span(curve).last(since)), digits);
      };
      std::printf("%-8s %5zu  %8s  %10s  %6s  %7s\n", kNames[index], curves.language.size() - 1,
                  recent(curves.language, 4).c_str(), recent(curves.kl, 4).c_str(),
                  number(curves.recall.back(), 3).c_str(), recent(curves.milliseconds, 2).c_str());
      std::fflush(stdout);
    }
  }
  Plot("Sparse attention learns where to look", phases)
      .write(options.plot,
             {{"language loss, nats per byte", "#3165a1", curves.language},
              {"KL(attention || indexer), nats", "#c83e30", curves.kl},
              {"share of full attention that the chosen rows hold", "#2e7559", curves.recall}});

  const std::size_t warm_up = phases[1].second, sparse = phases[2].second;
  const auto report = [](const char* what, const Change& change) {
    std::printf("%-26s %8s -> %s\n", what, number(change.first, 4).c_str(),
                number(change.last, 4).c_str());
    return change;
  };
  const std::size_t end = curves.language.size();
  std::printf("\nmeans over the first and the last quarter of a phase:\n");
  report("language loss, dense", change(curves.language, 0, warm_up));
  const Change kl = report("indexer KL, warm-up", change(curves.kl, warm_up, sparse));
  const Change language = report("language loss, sparse", change(curves.language, sparse, end));
  report("recall, warm-up and sparse", change(curves.recall, warm_up, end));
  std::printf("wrote %s\n", options.plot.c_str());

  constexpr double kMostKlLeft = 0.8;  // share of the KL after the warm-up
  const bool fell = kl.last <= kMostKlLeft * kl.first && language.last < language.first;
  std::printf(fell ? "both losses fell\n" : "at least one loss did not fall enough\n");
  return options.check && !fell ? 1 : 0;
}

int run(const Options& options) {
  const std::unique_ptr<Machine> machine = make_machine(options.device);
  const Tensor text = read_text(options.text).to(machine->device());
  const ModelShape shape = choose_shape(options);
  if (options.gradient_check && !gradients_are_right(*machine, text, shape.dtype)) return 1;
  return train(options, shape, text, *machine);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("A language model and its indexer learn with sparse attention");
  add_options(app, options);
  CLI11_PARSE(app, argc, argv);
  try {
    return run(options);
  } catch (const std::exception& error) {  // winnow::Error names the argument at fault
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
