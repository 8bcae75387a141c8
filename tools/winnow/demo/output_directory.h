// Where the demo leaves its pictures.
#pragma once

#include <string>

namespace winnow::demo {

// Creates the directory if it is missing and makes sure that files can be written there. Errors
// (winnow::Error): it is a file, cannot be created or cannot be written to.
void prepare_output_directory(const std::string& directory);

// Writes the file whole or not at all: into a new file with a name that nobody can foresee, which
// is then renamed. A symbolic link of the file's name is replaced, never followed. Returns its
// path. Errors (winnow::Error, resource): the disk is full and the like.
std::string write_file(const std::string& directory, const std::string& name,
                       const std::string& bytes);

}  // namespace winnow::demo
