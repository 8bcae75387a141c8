// Part of a test in a process of its own. Only for tests.
#pragma once

#include <functional>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace winnow::testing {

// Runs the test in a child, whose settings end with it. Success if it returns true.
inline ::testing::AssertionResult in_child(const std::function<bool()>& test) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that hangs dies
    _exit(test() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (status == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "the child ended with the wait status " << status;
}

}  // namespace winnow::testing
