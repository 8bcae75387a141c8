# CUOBJDUMP and NVDISASM, of the CUDA toolkit or of the wheels that `tools/setup wheels` installs; where they
# are not, it says that a test is skipped. SOURCE_DIR is the repository.
file(GLOB wheels ${SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu13/bin)
find_program(CUOBJDUMP cuobjdump HINTS ${wheels})
find_program(NVDISASM nvdisasm HINTS ${wheels})
if(CUOBJDUMP AND NVDISASM)
  get_filename_component(folder ${NVDISASM} DIRECTORY)
  set(ENV{PATH} "${folder}:$ENV{PATH}")  # where cuobjdump looks for it
else()
  message("SKIPPED: cuobjdump and nvdisasm are not there; `tools/setup wheels` installs them")
endif()
