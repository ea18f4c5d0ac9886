// FASTPAR_CHECK: argument checks of the op layer.
//
// The exception crosses into torch as a C++ exception and reaches Python as RuntimeError with this text. It must never
// be thrown inside parallel_for, where torch older than 2.13 replaces the text: validate before the parallel region.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fastpar {

template <typename... Args>
std::string concatenate(const Args&... args) {
  std::ostringstream text;
  ((text << args), ...);
  return text.str();
}

}  // namespace fastpar

#define FASTPAR_STRINGIZE_IMPL(x) #x
#define FASTPAR_STRINGIZE(x) FASTPAR_STRINGIZE_IMPL(x)

#define FASTPAR_CHECK(condition, ...)                                              \
  do {                                                                             \
    if (!(condition)) {                                                            \
      throw std::runtime_error("fastpar: " + ::fastpar::concatenate(__VA_ARGS__)); \
    }                                                                              \
  } while (0)
