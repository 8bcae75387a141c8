// Marks what the shared library shows; everything else is hidden. Only installed headers are API.
#pragma once

#define WINNOW_EXPORT __attribute__((visibility("default")))
