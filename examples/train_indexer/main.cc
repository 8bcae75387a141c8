// Trains a language model with sparse attention the way DeepSeek-V3.2 introduces it: a model that
// has learned with full attention, the warm-up of the indexer, then both with the indexer's choice.
// README.md explains the steps.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "model.h"
#include "plot.h"
#include "text.h"

namespace {

using winnow::DType;
using winnow::Tensor;

struct Options {
  std::string device = "cpu", text = TRAIN_INDEXER_TEXT, plot = "train_indexer.svg", dtype;
  std::int64_t dense = 200, warm_up = 200, sparse = 200, every = 25, seed = 1;
  std::int64_t tokens = 0, heads = 0, width = 0, topk = 0;  // 0: as fits the device
  double rate = 0.2, indexer_rate = 0.5;
  bool fast = false, check = false, gradient_check = false;
};

struct Option {
  const char* name;
  std::variant<std::string*, std::int64_t*, double*, bool*> target;
  const char* help;
};

std::vector<Option> option_table(Options& o) {
  return {{"--device", &o.device, "cpu or cuda"},
          {"--text", &o.text, "what to learn: a file, or a folder of sources"},
          {"--plot", &o.plot, "the picture to write, SVG"},
          {"--dense", &o.dense, "steps of the model with full attention"},
          {"--warm-up", &o.warm_up, "steps of the indexer alone"},
          {"--sparse", &o.sparse, "steps of both with sparse attention"},
          {"--every", &o.every, "steps from one printed line to the next"},
          {"--tokens", &o.tokens, "tokens of a step (cpu 128, cuda 4096)"},
          {"--heads", &o.heads, "heads of the attention (cpu 4, cuda 64)"},
          {"--width", &o.width, "width of the model (cpu 64, cuda 256)"},
          {"--topk", &o.topk, "rows that a query attends to (cpu 32, cuda 1024)"},
          {"--dtype", &o.dtype, "of the attention, f32 or bf16 (cpu f32, cuda bf16)"},
          {"--rate", &o.rate, "learning rate of the model"},
          {"--indexer-rate", &o.indexer_rate, "learning rate of the indexer"},
          {"--seed", &o.seed, "of the weights and of the places in the text"},
          {"--fast", &o.fast, "backward may add in any order: repeats differ in the last bits"},
          {"--gradient-check", &o.gradient_check, "first compare gradients with differences"},
          {"--check", &o.check, "exit with 1 unless the losses fall"}};
}

void parse(int argc, char** argv, Options& options) {
  const std::vector<Option> table = option_table(options);
  for (int i = 1; i < argc; ++i) {
    const auto option = std::find_if(table.begin(), table.end(), [&](const Option& known) {
      return std::strcmp(known.name, argv[i]) == 0;
    });
    if (option == table.end()) throw std::invalid_argument(std::string("no option ") + argv[i]);
    if (bool* const* flag = std::get_if<bool*>(&option->target)) {
      **flag = true;
      continue;
    }
    if (++i == argc) throw std::invalid_argument(std::string(option->name) + " needs a value");
    std::size_t used = 0;
    const std::string value = argv[i];
    if (std::string* const* text = std::get_if<std::string*>(&option->target)) {
      **text = value;
      used = value.size();
    } else if (std::int64_t* const* number = std::get_if<std::int64_t*>(&option->target)) {
      **number = std::stoll(value, &used);
    } else {
      *std::get<double*>(option->target) = std::stod(value, &used);
    }
    if (used != value.size()) throw std::invalid_argument(std::string(option->name) + " " + value);
  }
}

std::unique_ptr<Machine> make_machine(const std::string& device) {
  if (device == "cpu") return make_host_machine();
  if (device != "cuda") throw std::invalid_argument("--device " + device + ": want cpu or cuda");
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
    shape = {.tokens = 4096, .heads = 64, .width = 256, .topk = 1024, .index_heads = 8};
    shape.index_width = 64;
    shape.dtype = DType::bf16;
  }
  if (options.tokens > 0) shape.tokens = options.tokens;
  if (options.heads > 0) shape.heads = options.heads;
  if (options.width > 0) shape.width = options.width;
  if (options.topk > 0) shape.topk = options.topk;
  if (!options.dtype.empty()) {
    if (options.dtype != "f32" && options.dtype != "bf16") {
      throw std::invalid_argument("--dtype " + options.dtype + ": want f32 or bf16");
    }
    shape.dtype = options.dtype == "f32" ? DType::f32 : DType::bf16;
  }
  shape.deterministic = !options.fast;
  return shape;
}

Tensor load_text(const std::string& path, std::int64_t at_least, Machine& machine) {
  const std::string text = read_text(path);
  if (static_cast<std::int64_t>(text.size()) < at_least) {
    throw std::invalid_argument("--text " + path + ": shorter than --tokens");
  }
  Tensor bytes(DType::u8, {static_cast<std::int64_t>(text.size())});
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes.to(machine.device());
}

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

struct Curves {
  std::vector<double> language, kl, recall, milliseconds;  // of every step, NaN where not known
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

enum class Phase { dense, warm_up, sparse };
constexpr const char* kNames[] = {"dense", "warm-up", "sparse"};

// One step over a piece of the text; `measure` asks for the recall too.
void train_once(Phase phase, Model& model, Machine& machine, const winnow::ConstTensorView& piece,
                const Options& options, bool measure, Curves& curves) {
  const auto start = std::chrono::steady_clock::now();
  double kl = kNone, recall = kNone;
  model.project(piece);
  if (phase != Phase::dense) model.score();
  if (phase == Phase::sparse) model.choose();
  const double language = model.predict(phase == Phase::sparse);
  if (phase != Phase::warm_up) model.learn();
  if (phase != Phase::dense) kl = model.teach();
  // All gradients are taken before anything changes.
  if (phase != Phase::warm_up) {
    for (Parameter* parameter : model.main()) parameter->update(machine, options.rate);
  }
  if (phase != Phase::dense) {
    for (Parameter* parameter : model.indexer()) parameter->update(machine, options.indexer_rate);
  }
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

// Of a phase: means over its first and its last quarter, for one piece's loss is not another's.
Change change(std::span<const double> curve, std::size_t first_step, std::size_t steps) {
  const std::span<const double> phase = curve.subspan(first_step, steps);
  const std::size_t quarter = (steps + 3) / 4;
  return {mean(phase.first(quarter)), mean(phase.last(quarter))};
}

int train(const Options& options, Machine& machine) {
  const ModelShape shape = choose_shape(options);
  const Tensor text = load_text(options.text, shape.tokens + 1, machine);
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
    const int number = static_cast<int>(phase);
    phases.emplace_back(kNames[number], curves.language.size());
    for (std::int64_t step = 0; step < steps[number]; ++step) {
      const bool print = step % options.every == 0 || step == steps[number] - 1;
      const std::int64_t places = text.numel() - shape.tokens;
      const auto place = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(places));
      train_once(phase, model, machine, text.view().slice(0, place, place + shape.tokens + 1),
                 options, print, curves);
      if (!print) continue;
      // Losses and times since the line before.
      const auto since = static_cast<std::size_t>(step == 0 ? 1 : (step - 1) % options.every + 1);
      std::printf("%-8s %5zu  %8.4f  %10.4f  %6.3f  %7.2f\n", kNames[number],
                  curves.language.size() - 1, mean(std::span(curves.language).last(since)),
                  mean(std::span(curves.kl).last(since)), curves.recall.back(),
                  mean(std::span(curves.milliseconds).last(since)));
      std::fflush(stdout);
    }
  }
  Plot("Sparse attention learns where to look", phases)
      .write(options.plot,
             {{"language loss, nats per byte", "#3165a1", curves.language},
              {"KL(attention || indexer), nats", "#c83e30", curves.kl},
              {"share of full attention that the chosen rows hold", "#2e7559", curves.recall}});

  const std::size_t warm_up = phases[1].second, sparse = phases[2].second;
  const Change kl = change(curves.kl, warm_up, sparse - warm_up);
  const Change recall = change(curves.recall, warm_up, curves.recall.size() - warm_up);
  const Change dense = change(curves.language, 0, warm_up);
  const Change language = change(curves.language, sparse, curves.language.size() - sparse);
  std::printf("\nmeans over the first and the last quarter of a phase:\n");
  std::printf("language loss, dense       %8.4f -> %.4f\n", dense.first, dense.last);
  std::printf("indexer KL, warm-up        %8.4f -> %.4f\n", kl.first, kl.last);
  std::printf("language loss, sparse      %8.4f -> %.4f\n", language.first, language.last);
  std::printf("recall, warm-up and sparse %8.4f -> %.4f\n", recall.first, recall.last);
  std::printf("wrote %s\n", options.plot.c_str());

  constexpr double kKlLeft = 0.8;  // of the KL, after the warm-up
  const bool fell = kl.last <= kKlLeft * kl.first && language.last < language.first;
  std::printf(fell ? "both losses fell\n" : "the losses did not fall as they should\n");
  return options.check && !fell ? 1 : 0;
}

// The gradients by hand against differences of the losses, along a random half of each gradient.
bool gradients_are_right(const Options& options, Machine& machine) {
  constexpr double kStep = 0.02;
  ModelShape shape{.tokens = 48, .heads = 3, .width = 24, .topk = 12, .index_heads = 3};
  shape.dtype = choose_shape(options).dtype;
  const double tolerance = shape.dtype == DType::f32 ? 0.01 : 0.05;  // of the slope
  const Tensor text = load_text(options.text, shape.tokens + 1, machine);
  Model model(machine, shape, static_cast<std::uint64_t>(options.seed));
  std::mt19937_64 random(7);
  const auto losses = [&] {  // for a choice that stays
    model.project(text.view().slice(0, 0, shape.tokens + 1));
    model.score();
    const double language = model.predict(true);
    model.learn();
    return std::pair(language, model.teach());
  };
  model.project(text.view().slice(0, 0, shape.tokens + 1));
  model.score();
  model.choose();
  bool right = true;
  const auto check = [&](const char* name, Parameter& parameter, bool of_indexer) {
    losses();
    Tensor direction = parameter.gradient.to({});
    double slope = 0;
    for (float& number : direction.values<float>()) {
      if (random() % 2 == 0) number = 0;
      slope += double(number) * number;
    }
    slope = std::sqrt(slope);
    const Tensor before = parameter.value.to({});
    double after[2];
    for (const int side : {0, 1}) {
      Tensor moved = before.clone();
      const double step = (side == 0 ? -kStep : kStep) / slope;
      for (std::size_t i = 0; i < moved.values<float>().size(); ++i) {
        moved.values<float>()[i] += static_cast<float>(step * direction.values<float>()[i]);
      }
      parameter.value = moved.to(machine.device());
      const auto [language, kl] = losses();
      after[side] = of_indexer ? kl : language;
    }
    parameter.value = before.to(machine.device());
    const double difference = (after[1] - after[0]) / (2 * kStep);
    const bool close = std::abs(difference - slope) <= tolerance * slope;
    std::printf("gradient of %-13s by hand %.6f, by differences %.6f%s\n", name, slope, difference,
                close ? "" : "  WRONG");
    right = right && close;
  };
  const char* main_names[] = {"embedding", "query", "latent", "output", "unembedding"};
  const char* indexer_names[] = {"indexer query", "indexer key", "indexer weight"};
  for (int i = 0; i < 5; ++i) check(main_names[i], *model.main()[i], false);
  for (int i = 0; i < 3; ++i) check(indexer_names[i], *model.indexer()[i], true);
  std::printf(right ? "all gradients are right\n\n" : "some gradients are wrong\n\n");
  return right;
}

int run(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") != 0) continue;
    for (const Option& option : option_table(options)) {
      std::printf("  %-17s %s\n", option.name, option.help);
    }
    return 0;
  }
  parse(argc, argv, options);
  const std::unique_ptr<Machine> machine = make_machine(options.device);
  if (options.gradient_check && !gradients_are_right(options, *machine)) return 1;
  return train(options, *machine);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {  // winnow::Error names the argument at fault
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
