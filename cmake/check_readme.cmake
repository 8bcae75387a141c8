# The C++ program in the README is the one in examples/first_call, which the tests build and run.
file(READ ${SOURCE}/README.md readme)
file(READ ${SOURCE}/examples/first_call/main.cc program)
string(FIND "${readme}" "```cpp\n${program}```" position)
if(position EQUAL -1)
  message(FATAL_ERROR "README.md does not show examples/first_call/main.cc as it is")
endif()
