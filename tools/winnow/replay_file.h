// Reads a record of a call that WINNOW_RECORD wrote; winnow/core/record.cc says how it is made.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"

namespace winnow::cli {

struct RecordedTensor {
  bool output = false;  // the call may have written it
  detail::TensorLayout layout;
  std::vector<char> before;  // from the element that lies lowest to the one that lies highest
  std::vector<char> after;   // the same when the call was done; empty if that is not known
};

struct CallRecord {
  std::string operation;
  std::string library;             // its version
  std::optional<Backend> backend;  // that was forced
  bool check = false;
  std::map<std::string, std::optional<RecordedTensor>> tensors;  // nullopt: absent
  std::map<std::string, std::string> values;                     // "": absent
  std::string result;  // "cpu 0.0012" (seconds), "error ...", or empty: the call never ended
};

// Throws Error (invalid_argument) where the file is none, is cut or does not fit together.
CallRecord read_record(const std::string& path);

}  // namespace winnow::cli
