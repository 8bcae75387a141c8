# Fails where ptxas wrote an instruction that no GPU executes: one whose descriptor is in a pair of uniform
# registers that begins with an odd one, `desc[UR1]`. ptxas 13.0 does so for copies (LDGSTS) whose address in
# shared memory has a uniform part; neither a compiler nor the simulator notices (docs/notes/indexer.md).
# Reads machine code: no GPU is needed.
#   cmake "-DCODE=objects or libraries, or a text of cuobjdump, *.sass" -DSOURCE_DIR=repository
#         -P check_descriptors.cmake
# Without a disassembler (`tools/setup wheels` installs one) it prints "SKIPPED".
cmake_minimum_required(VERSION 3.25)
if(CODE MATCHES "[.]sass$")
  set(disassemble cat ${CODE})
else()
  include(${SOURCE_DIR}/cmake/find_disassembler.cmake)
  if(NOT CUOBJDUMP OR NOT NVDISASM)
    return()
  endif()
  find_program(PYTHON python3 REQUIRED)
  string(REPLACE "|" ";" CODE "${CODE}")
  set(disassemble ${PYTHON} ${SOURCE_DIR}/cmake/disassemble_descriptors.py ${CUOBJDUMP} ${NVDISASM} ${CODE})
endif()
execute_process(COMMAND ${disassemble} COMMAND awk [[
  /Function : / { kernel = $NF; ++kernels }
  /[ ,]desc\[UR[0-9]*[13579]\]/ { sub(/;.*/, ""); print "  " kernel ":" $0; faults = 1 }
  END { if (!faults) print kernels + 0 " kernels are right" }]]
  OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
if(NOT found MATCHES "^[1-9][0-9]* kernels are right")
  message(FATAL_ERROR "instructions that no GPU executes in ${CODE}:\n${found}")
endif()
message("${found}")
