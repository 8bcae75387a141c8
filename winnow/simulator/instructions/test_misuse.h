// Expects that calls break a rule of the hardware, and that the report says which.
#pragma once

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/simulator/instructions/misuse.h"

namespace winnow::simulator {

// `text` is a part of what the report of `call()` says.
template <class Call>
void expect_misuse(const Call& call, const char* check, const char* text) {
  try {
    call();
    ADD_FAILURE() << "nothing was reported: expected " << check << ": " << text;
  } catch (const Misuse& misuse) {
    EXPECT_STREQ(misuse.check(), check);
    EXPECT_THAT(misuse.what(), ::testing::HasSubstr(text));
  }
}

}  // namespace winnow::simulator
