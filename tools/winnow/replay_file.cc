#include "tools/winnow/replay_file.h"

#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "winnow/core/error.h"
#include "winnow/core/extent.h"

namespace winnow::cli {
namespace {

constexpr std::array kDTypes = {DType::f32, DType::f16, DType::bf16, DType::f8_e4m3,
                                DType::u8,  DType::i32, DType::i64,  DType::f64};

// Of a line: a tensor's has up to kMaxRank sizes and strides, an error's text a few of them.
constexpr std::size_t kLongestLine = 1 << 16;

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(path, error);
    // A pipe would be waited for, and a device need not end.
    if (exists(status) && !is_regular_file(status)) fail("a regular file");
    file_.open(path, std::ios::binary);
    if (!file_) fail("a file that can be read");
  }

  [[noreturn]] void fail(const std::string& wanted) const {
    throw Error(ErrorCode::invalid_argument, "replay", "FILE", wanted, "\"" + path_ + "\"");
  }

  // The next line, or nothing at the end of the file.
  std::optional<std::string> line() {
    std::string text;
    for (int letter; (letter = file_.get()) != std::char_traits<char>::eof();) {
      if (letter == '\n') return text;
      if (text.size() == kLongestLine) fail("lines of at most 65536 bytes");
      text += static_cast<char>(letter);
    }
    return text.empty() ? std::nullopt : std::optional(text);
  }

  std::vector<char> bytes(std::int64_t count) {
    const auto here = file_.tellg();
    file_.seekg(0, std::ios::end);
    const std::int64_t left = file_.tellg() - here;
    file_.seekg(here);
    if (count < 0 || count > left) fail("a record with the data of all its tensors");
    std::vector<char> data(static_cast<std::size_t>(count));
    file_.read(data.data(), count);
    return data;
  }

 private:
  std::string path_;
  std::ifstream file_;
};

// "[1,2,3]"
std::vector<std::int64_t> numbers(const Reader& reader, const std::string& text) {
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') reader.fail("a list in [ ]");
  std::vector<std::int64_t> list;
  std::istringstream in(text.substr(1, text.size() - 2));
  for (std::string number; std::getline(in, number, ',');) {
    std::int64_t value = 0;
    const char* const end = number.data() + number.size();
    const auto read = std::from_chars(number.data(), end, value);
    if (read.ec != std::errc() || read.ptr != end) reader.fail("numbers in a list");
    list.push_back(value);
  }
  if (list.size() > kMaxRank) reader.fail("at most " + std::to_string(kMaxRank) + " dimensions");
  return list;
}

std::optional<RecordedTensor> read_tensor(const Reader& reader, std::istringstream& words,
                                          std::int64_t& bytes) {
  std::string dtype, device, shape, strides;
  if (!(words >> dtype)) return std::nullopt;
  if (!(words >> device >> shape >> strides >> bytes)) reader.fail("a tensor's line in full");
  for (const DType known : kDTypes) {
    if (dtype != to_string(known)) continue;
    RecordedTensor tensor;
    tensor.layout = detail::TensorLayout::make(known, numbers(reader, shape),
                                               numbers(reader, strides), Device{});
    if (device.starts_with("cuda")) tensor.layout.device.type = DeviceType::cuda;
    return tensor;
  }
  reader.fail("dtypes of Winnow");
}

}  // namespace

CallRecord read_record(const std::string& path) {
  Reader reader(path);
  if (reader.line() != "winnow call 1") reader.fail("a record of a call, made with WINNOW_RECORD");
  CallRecord record;
  std::vector<std::pair<std::string, std::int64_t>> sizes;  // of the tensors, in their order
  for (bool more = true; more;) {
    const std::optional<std::string> line = reader.line();
    if (!line) reader.fail("a record that is complete up to its tensors");
    std::istringstream words(*line);
    std::string key, name;
    words >> key >> name;
    if (key == "operation") {
      record.operation = name;
    } else if (key == "library") {
      record.library = name;
    } else if (key == "backend") {
      if (name == "-") continue;
      for (const BackendStatus& status : backends()) {
        if (name == to_string(status.backend)) record.backend = status.backend;
      }
      if (!record.backend) reader.fail("a backend of Winnow");
    } else if (key == "check") {
      record.check = name == "1";
    } else if (key == "value") {
      std::string text;
      words >> text;
      record.values[name] = text == "-" ? "" : text;
    } else if (key == "tensor" || key == "output") {
      std::int64_t bytes = 0;
      if (record.tensors.contains(name)) reader.fail("one line for the tensor \"" + name + "\"");
      record.tensors[name] = read_tensor(reader, words, bytes);
      if (!record.tensors[name]) continue;
      record.tensors[name]->output = key == "output";
      const std::int64_t whole = extent_of(record.tensors[name]->layout).bytes;
      // What a workspace held says nothing, and is not recorded.
      const bool of_scratch = name == "workspace" && bytes == 0;
      if (bytes != whole && !of_scratch) reader.fail("as many bytes as the shape needs");
      sizes.emplace_back(name, bytes);
    } else if (key == "data") {
      more = false;
    } else {
      reader.fail("no line that begins with \"" + key + "\"");
    }
  }
  for (const auto& [name, bytes] : sizes) record.tensors[name]->before = reader.bytes(bytes);
  const std::optional<std::string> result = reader.line();
  if (!result || !result->starts_with("result ")) return record;  // the call ended the process
  record.result = result->substr(7);
  const std::optional<std::string> data = reader.line();
  std::istringstream words(data.value_or(""));
  std::string key;
  if (!(words >> key) || key != "data") reader.fail("the data of the result");
  if (record.result.starts_with("error")) return record;
  for (const auto& [name, bytes] : sizes) {
    RecordedTensor& tensor = *record.tensors[name];
    if (tensor.output) tensor.after = reader.bytes(bytes);
  }
  return record;
}

}  // namespace winnow::cli
