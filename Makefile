# make            builds ./train for every type and device of this machine (BACKEND=cpu|all; one op set:
#                 PRECISION=fp32|bf16|double, BACKEND=cuda; CC=gcc|clang, PORTABLE=1)
# make demo       trains a small model from scratch on text that every machine has, and draws its memory
# make test       builds and runs every test; needs no GPU
# make test-quick checks that every gradient still holds: ops, methods, golden, plan, resume at a few cases; two minutes
# make test-since the tests that read a file changed since a commit (REV=HEAD)
# make test-gpu   the tests on a GPU, every op against op set "cpu"; writes dev/results/
# make install    as streambp into PREFIX/bin (/usr/local)
# make dist       archives for other machines, in dist/: of the CPU, and with CUDA if nvcc is found; make wheel: wheels
# make fuzz       libFuzzer on every parser (TARGET=, SECONDS=); needs clang
# make bench      measures ratios of speed, within one run (LLMC=<llm.c checkout> to compare with llm.c)
# make format, make lint, make check-cxx, make clean
#
# Every configuration has its own folder below build/, so switching needs no `make clean`. The system's package manager
# installs what is missing (scripts/install_deps.sh lists it; it asks on a terminal). DEPS=skip refuses, DEPS=yes agrees.

CC        ?= cc
# CUDA=<folder>: the toolkit to use, or one made from wheels (scripts/cuda_wheels.sh)
NVCC      ?= $(if $(CUDA),$(abspath $(CUDA))/bin/nvcc,nvcc)
ifeq ($(origin CXX),default)
CXX       := $(if $(findstring clang,$(notdir $(firstword $(CC)))),$(subst clang,clang++,$(firstword $(CC))),c++)
endif
DEPS      ?=
# PORTABLE=1 builds for other machines. They need the C library and, for BACKEND=cuda, the driver and CUDA's libraries.
# CJSON=<folder>: compile the cJSON.c in it; PORTABLE takes the system's source package unless it is given.
override PORTABLE := $(filter-out 0,$(PORTABLE))
ifneq ($(PORTABLE),)
ONEDNN    := 0
MPI       := 0
CJSON     := $(or $(CJSON),build/cjson)
endif
export DEPS CC CXX ONEDNN LIBEVENT MPI MPICC CJSON

# SETS: op sets of ./train, in order of preference: every type of the CPU, and of CUDA if nvcc and a GPU are found.
# BACKEND=cpu: of the CPU alone. BACKEND=all: of CUDA without a GPU, too. PRECISION= or BACKEND=cuda builds one op set.
GPU       := $(shell scripts/cuda_libraries.sh gpu)
HAVE_CUDA := $(if $(GPU),$(shell command -v $(NVCC) 2>/dev/null))
BUILT_FOR := $(if $(BACKEND),$(if $(filter cpu,$(BACKEND)),the CPU as asked,CUDA),$(if $(HAVE_CUDA),CUDA,the CPU \
             $(if $(GPU),(there is a GPU but no nvcc: install the CUDA toolkit or say scripts/cuda_wheels.sh toolkit \
             && make CUDA=toolkit),(nvidia-smi lists no GPU))))
CPU_SETS  := cpu-fp32 cpu-bf16
ALL_SETS  := cuda-bf16 cuda-fp32 $(CPU_SETS)
ifneq ($(filter-out cpu cuda all,$(BACKEND)),)
$(error BACKEND=$(BACKEND) is not cpu, cuda or all)
endif
ifneq ($(filter-out fp32 bf16 double,$(PRECISION)),)
$(error PRECISION=$(PRECISION) is not fp32, bf16 or double)
endif
ifeq ($(BACKEND)-$(PRECISION),cuda-double)
$(error BACKEND=cuda has no double build; PRECISION is bf16 or fp32)
endif
ifeq ($(BACKEND)$(if $(PRECISION),-one),all-one)
$(error BACKEND=all builds every type; leave PRECISION out)
endif
ifeq ($(PRECISION)$(filter cuda,$(BACKEND)),)
NAME      := $(or $(BACKEND),$(if $(HAVE_CUDA),all,cpu))
SETS      := $(if $(filter all,$(NAME)),$(ALL_SETS),$(CPU_SETS))
override BACKEND := $(if $(filter all,$(NAME)),cuda,cpu)
endif
BACKEND   ?= $(if $(HAVE_CUDA),cuda,cpu)
PRECISION ?= $(if $(filter cuda,$(BACKEND)),bf16,fp32)
SETS      ?= $(BACKEND)-$(PRECISION)
NAME      ?= $(BACKEND)-$(PRECISION)
HAS       := $(sort $(foreach s,$(SETS),$(firstword $(subst -, ,$(s)))))# cpu, cuda

COMPILER  := $(notdir $(firstword $(CC)))
PLAIN     := $(if $(filter 0,$(ONEDNN)),-plain)
SUFFIX    := $(addprefix -,$(filter-out cc gcc,$(COMPILER)))$(if $(PORTABLE),-portable,$(PLAIN))
suffix_of  = $(if $(filter cuda-%,$(1)),$(if $(PORTABLE),-portable),$(SUFFIX))
BUILD     := build/$(NAME)$(call suffix_of,$(NAME))
# Configurations share the objects of the driver and of each op set. If the command line says BUILD, all are in BUILD.
SAYS      := $(filter command,$(origin BUILD))
DRIVER    := $(if $(SAYS),$(BUILD),build/driver$(SUFFIX))
folder_of  = $(if $(word 2,$(SETS)),$(if $(SAYS),$(BUILD),build)/$(1)$(if $(SAYS),,$(call suffix_of,$(1))),$(BUILD))
CPU_FOLDERS  := $(foreach s,$(filter cpu-%,$(SETS)),$(call folder_of,$(s)))
CUDA_FOLDERS := $(foreach s,$(filter cuda-%,$(SETS)),$(call folder_of,$(s)))
$(foreach s,$(SETS),$(eval $(call folder_of,$(s))/ops_%: PRECISION = $(lastword $(subst -, ,$(s)))))

NO_BUILD_GOALS := clean format help dist wheel
ifneq ($(if $(MAKECMDGOALS),$(filter-out $(NO_BUILD_GOALS),$(MAKECMDGOALS)),all),)
# Installs libraries before we look for them: GNU make remakes what it includes, then starts over.
-include build/deps$(if $(CJSON),-cjson).mk
endif

# ---- what this machine has, found by trying --------------------------------------------------------------------------
try_header = $(shell printf '\043include <$(1)>\n' | $(CC) $(CPPFLAGS) -E - >/dev/null 2>&1 && echo yes)
try_flag   = $(shell printf 'int main(void){return 0;}\n' | $(CC) $(1) -x c - -o /dev/null >/dev/null 2>&1 && echo $(1))

HAVE_ONEDNN := $(if $(filter 0,$(ONEDNN)),,$(call try_header,dnnl.h))
# PCRE2 runs the patterns of tokenizers and adapters. PORTABLE links it statically.
PCRE2_LIB   := $(if $(PORTABLE),$(shell $(CC) -print-file-name=libpcre2-8.a),\
               $(or $(shell pcre2-config --libs8 2>/dev/null),-lpcre2-8))
# libevent (BSD) speaks HTTP for `sample --serve`. PORTABLE links it statically, if there are archives of it; LIBEVENT=0
# builds without it.
LIBEVENT_LIBS := $(if $(PORTABLE),$(filter /%,$(foreach l,extra core,$(shell $(CC) -print-file-name=libevent_$(l).a))),\
                 -levent_extra -levent_core)
HAVE_LIBEVENT := $(if $(or $(filter 0,$(LIBEVENT)),$(if $(word 2,$(LIBEVENT_LIBS)),,none)),,$(call try_header,event2/http.h))
# MPI connects the processes of a run. MPI=0 builds without it; MPICC names the compiler of another MPI.
MPI_FLAGS ?= $(shell MPI='$(MPI)' MPICC='$(MPICC)' scripts/mpi_flags.sh compile)
MPI_LIBS  ?= $(shell MPI='$(MPI)' MPICC='$(MPICC)' scripts/mpi_flags.sh link)
HAVE_MPI  := $(if $(MPI_LIBS),yes)
comma     := ,
# PORTABLE links OpenMP's runtime statically. If the compiler has no static one (clang), the build has one thread.
OPENMP_FILE := $(if $(findstring clang,$(COMPILER)),libomp.a,libgomp.a)
OPENMP_LIB  := $(if $(PORTABLE),$(filter /%,$(shell $(CC) -print-file-name=$(OPENMP_FILE))))
OPENMP_FLAG := $(if $(filter yes,$(PORTABLE:%=yes)$(OPENMP_LIB)),-fopenmp-simd,-fopenmp)
HAVE_OPENMP := $(or $(call try_flag,$(OPENMP_FLAG)),$(call try_flag,-fopenmp-simd))
NATIVE      := $(call try_flag,-march=$(if $(PORTABLE),x86-64-v3,native))

# A program uses only part of its headers' functions. C++ warns about {0}, which C allows. WERROR=-Werror: of the tests
WERROR   ?=
WARNINGS := -Wall -Wextra $(WERROR) -Wno-unused-function $(if $(HAVE_OPENMP),,-Wno-unknown-pragmas)
CXX_WARNINGS := -Wall -Wextra $(WERROR) -Wno-unused-function -Wno-missing-field-initializers -Wno-missing-braces
DEFINES   = -D_GNU_SOURCE -DPRECISION_$(subst fp,FP,$(subst bf,BF,$(subst double,DOUBLE,$(PRECISION)))) \
            $(if $(HAVE_ONEDNN),-DHAVE_ONEDNN)
# KEEP_ARGUMENTS: gcc 12.2 drops the store of a struct argument before a call of a function that it finds const, if
# the same struct was passed before, though calls in between overwrote it. Such stores hold where sp does not move.
KEEP_ARGUMENTS := $(call try_flag,-maccumulate-outgoing-args)
# -fPIC: the C library and the program share environ and the program's name, also where dist.sh links against an older one.
OPTIMISE := -O3 $(NATIVE) -ffp-contract=fast -fno-math-errno -fno-trapping-math $(KEEP_ARGUMENTS) \
            $(if $(PORTABLE),-fPIC)
CFLAGS   ?= -g
ifneq ($(CJSON),)
CJSON_OBJECT := $(DRIVER)/cJSON.o
CJSON_FLAGS  := -I$(DRIVER)/include
endif
# Libraries of every program; those of BACKEND=cuda are below (NVCC_LIBS).
LDLIBS   := $(CJSON_OBJECT) $(or $(OPENMP_LIB),$(HAVE_OPENMP)) $(if $(PORTABLE),-static-libgcc) \
            $(if $(HAVE_ONEDNN),-ldnnl) $(PCRE2_LIB) $(HAVE_LIBEVENT:yes=$(LIBEVENT_LIBS)) $(MPI_LIBS) \
            $(if $(CJSON),,-lcjson) -lm -pthread
# The driver is C11 (and C++20): no GNU extensions, no precision. Op set "cpu" uses vector extensions of gcc and clang.
DRIVER_FLAGS = -std=c11 -pthread -D_GNU_SOURCE $(HAVE_LIBEVENT:yes=-DHAVE_LIBEVENT) $(WARNINGS) $(OPTIMISE) $(HAVE_OPENMP) \
               -I. $(CJSON_FLAGS) $(CFLAGS)
OPS_FLAGS    = -std=gnu11 $(DEFINES) $(WARNINGS) $(OPTIMISE) $(HAVE_OPENMP) -I. $(CFLAGS)

# ---- the program -----------------------------------------------------------------------------------------------------
.PHONY: all install dist wheel demo test test-quick test-since test-gpu test-gpu-build fuzz bench format lint check-cxx \
        clean help deps FORCE
TYPES := $(if $(word 2,$(SETS)),$(if $(filter cuda,$(HAS)),bf16 or fp32 (--dtype); --device cpu: the CPU,fp32 or \
         bf16 (--dtype)),$(PRECISION))
all: train
	@$(if $(findstring s,$(firstword -$(MAKEFLAGS))),:,echo './train is for $(BUILT_FOR), in $(TYPES). \
Next: make demo, or Fine-tune a chat model in README.md')

# Compared every time: ./train may be a newer build of another configuration.
train: $(BUILD)/train FORCE
	@cmp -s $< $@ || { cp $< $@.new && mv $@.new $@; }

# ops.o: all that the driver links: op sets, their list, and the other ranks. The map of PORTABLE names what is static.
$(BUILD)/train: $(DRIVER)/train_gpt.o $(BUILD)/ops.o $(BUILD)/commit.o $(if $(PORTABLE),$(DRIVER)/portable.o)
	$(LINK) $^ $(LINKED) $(LDFLAGS) $(if $(PORTABLE),-Xlinker --gc-sections -Xlinker -Map=$@.map) -o $@

$(DRIVER)/portable.o: llmc/base/portable.c $(DRIVER)/driver_flags
	$(CC) $(DRIVER_FLAGS) -march=x86-64 -MMD -MP -c $< -o $@

$(DRIVER)/train_gpt.o: train_gpt.cu $(DRIVER)/driver_flags
	$(CC) $(DRIVER_FLAGS) -MMD -MP -x c -c $< -o $@

$(DRIVER)/dist.o: llmc/ranks/dist.c $(DRIVER)/driver_flags
	$(CC) $(DRIVER_FLAGS) $(DIST_FLAGS) -MMD -MP -c $< -o $@

$(CPU_FOLDERS:%=%/ops_cpu.o): %/ops_cpu.o: llmc/ops/cpu/ops_cpu.c %/ops_flags
	$(CC) $(OPS_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/op_sets.c: FORCE
	@mkdir -p $(BUILD)
	@scripts/op_sets.sh $(subst -,_,$(SETS)) | cmp -s - $@ || scripts/op_sets.sh $(subst -,_,$(SETS)) > $@

$(BUILD)/ops.o: $(CPU_FOLDERS:%=%/ops_cpu.o) $(CUDA_FOLDERS:%=%/ops_cuda.o) $(DRIVER)/dist.o $(BUILD)/op_sets.o \
                $(BUILD)/flags
	ld -r $(filter %.o,$^) -o $@

LINK   = $(if $(filter cuda,$(HAS)),$(NVCC_LINK),$(CC))
LINKED = $(if $(filter cuda,$(HAS)),$(NVCC_LIBS) $(if $(filter cpu,$(HAS)),$(if $(HAVE_ONEDNN),-ldnnl)),$(LDLIBS))
DIST_FLAGS := $(if $(HAVE_MPI),-DHAVE_MPI $(MPI_FLAGS))

ifneq ($(filter cuda,$(HAS)),)
# nvcc compiles op set "cuda", for this machine's GPU, or without one for every architecture that it knows.
# cuda_libraries.sh sets ARCHS, TOOLKIT, CUDA_LIBRARIES and NCCL_FLAGS, each ended by ;;, or ends make with one line.
export NVCC CUBLAS CUDNN CUDNN_FRONTEND NCCL MPI_FLAGS MPI_LIBS
define newline


endef
cuda_variable  = $(1)='$($(1))'
CUDA_VARIABLES := NVCC CXX ARCHS GPU PORTABLE CUBLAS CUDNN CUDNN_FRONTEND NCCL MPI_FLAGS MPI_LIBS
CUDA_SETTINGS  := $(shell $(foreach v,$(CUDA_VARIABLES),$(call cuda_variable,$(v))) scripts/cuda_libraries.sh make)
$(eval $(subst ;;,$(newline),$(CUDA_SETTINGS)))
# 90 is compiled as sm_90a, which has Hopper's own instructions; a newer GPU compiles the plain PTX of the last one. For
# 90 alone the PTX would take half of the compilation, so there is none.
GENCODE    := $(foreach a,$(ARCHS:90=90a),-gencode arch=compute_$(a),code=sm_$(a)) \
              $(foreach a,$(if $(filter-out 90,$(ARCHS)),$(lastword $(ARCHS))),-gencode arch=compute_$(a),code=compute_$(a))
NOT_UNIQUE := $(if $(findstring clang,$(CXX)),,-fno-gnu-unique)# objcopy cannot hide unique symbols
# cuDNN's attention is bf16's.
WITH_CUDNN = $(if $(filter bf16,$(PRECISION)),$(findstring -DHAVE_CUDNN,$(CUDA_LIBRARIES)))
NVCC_FLAGS  = -std=c++20 -x cu -O3 $(GENCODE) --threads 2 -ccbin $(CXX) \
              $(filter-out -DHAVE_ONEDNN,$(DEFINES)) \
              $(WITH_CUDNN) $(NCCL_FLAGS) $(CUBLAS:%=-isystem %/include) \
              -diag-suppress 177 \
              -Xcompiler '$(CXX_WARNINGS) $(NOT_UNIQUE) $(filter-out -O3,$(OPTIMISE)) $(HAVE_OPENMP)' \
              -I. $(CJSON_FLAGS) $(CUDA_FLAGS)
# nvcc takes mpicc's compiler flags only in this form.
NVCC_MPI   := $(patsubst -Wl$(comma)%,-Xlinker %,$(patsubst -pthread,-Xcompiler -pthread,$(MPI_LIBS)))
# CUDA's libraries are opened at run time (llmc/ops/cuda/library.h), in the build's folders unless PORTABLE.
CUDA_PATHS := $(CUBLAS:%=%/lib) $(CUDNN:%=%/lib) $(NCCL:%=%/lib) $(wildcard $(TOOLKIT)/lib64 $(TOOLKIT)/lib)
RUN_PATHS  := $(if $(PORTABLE),,$(abspath $(CUDA_PATHS)))
NVCC_LIBS  := $(CJSON_OBJECT) $(or $(OPENMP_LIB),$(HAVE_OPENMP:%=-Xcompiler %)) \
              $(if $(PORTABLE),-Xcompiler -static-libstdc++$(comma)-static-libgcc) \
              $(RUN_PATHS:%=-Xlinker -rpath$(comma)%) $(if $(CJSON),,-lcjson) $(PCRE2_LIB) $(HAVE_LIBEVENT:yes=$(LIBEVENT_LIBS)) \
              -lm -Xcompiler -pthread -ldl $(NVCC_MPI)

$(CUDA_FOLDERS:%=%/ops_cuda_kernels.o): %/ops_cuda_kernels.o: llmc/ops/cuda/ops_cuda.cu %/ops_flags
	$(NVCC) $(NVCC_FLAGS) -MMD -MP -c $< -o $@

%/cudnn_attention.o: llmc/ops/cuda/cudnn_attention.cc %/ops_flags
	$(CXX) -std=c++20 -O2 -D_GNU_SOURCE $(CXX_WARNINGS) $(NOT_UNIQUE) $(CUDA_LIBRARIES) \
		$(patsubst %,-ffile-prefix-map=%=.,$(filter /%,$(CUDA_LIBRARIES))) -I. -MMD -MP -c $< -o $@

# The whole op set in one object, which exports its table alone: templates that both compiled would be shared otherwise.
# bf16's also exports cuDNN's attention, which bench times and tests of attention count.
$(foreach f,$(CUDA_FOLDERS),$(if $(findstring fp32,$(f)),,$(if $(findstring -DHAVE_CUDNN,$(CUDA_LIBRARIES)),\
    $(eval $(f)/ops_cuda.o: $(f)/cudnn_attention.o))))
$(CUDA_FOLDERS:%=%/ops_cuda.o): %/ops_cuda.o: %/ops_cuda_kernels.o
	ld -r --force-group-allocation $(filter %.o,$^) -o $@
	objcopy --wildcard --keep-global-symbol=ops_cuda_$(PRECISION) --keep-global-symbol='cudnn_attention_*' $@
endif

$(BUILD)/pack_bytes: data/pack_bytes.c $(DRIVER)/driver_flags | $(BUILD)/flags
	$(CC) $(DRIVER_FLAGS) -MMD -MP $< -lm -o $@

$(BUILD)/ops.o: | $(CJSON_OBJECT)
$(DRIVER)/cJSON.o: $(CJSON)/cJSON.c $(DRIVER)/driver_flags
	$(CC) -O2 -c $(DRIVER)/include/cjson/cJSON.c -o $@

build/cjson/cJSON.c:
	@scripts/install_deps.sh cjson
%/cJSON.c:
	@echo 'CJSON=$*: there is no cJSON.c in it; name the folder of its source' >&2; exit 1

# The version and commit that --version prints; recompiled when they change.
COMMIT = const char build_commit[] = "$(or $(shell git describe --always --dirty --abbrev=12 2>/dev/null),unknown)"; \
	const char build_version[] = "$(or $(shell cat VERSION 2>/dev/null),unknown)";
$(BUILD)/commit.c: FORCE
	@mkdir -p $(BUILD)
	@echo '$(COMMIT)' | cmp -s - $@ || echo '$(COMMIT)' > $@

$(BUILD)/commit.o $(BUILD)/op_sets.o: %.o: %.c
	@$(CC) -c $< -o $@

# Rebuild when the flags change (a library was installed, another compiler), but not for WERROR.
quoted = "$(subst ",\",$(filter-out $(WERROR),$(1)))"
define keep_flags
@mkdir -p $(@D)
@echo $(call quoted,$(1)) | cmp -s - $@ || { $(2) echo $(call quoted,$(1)) >$@; }
endef
$(DRIVER)/driver_flags: FORCE $(CJSON:%=%/cJSON.c)
	$(if $(CJSON),@mkdir -p $(DRIVER)/include; ln -sfn $(abspath $(CJSON)) $(DRIVER)/include/cjson)
	$(call keep_flags,$(DRIVER_FLAGS) $(DIST_FLAGS))
$(CPU_FOLDERS:%=%/ops_flags): FORCE
	$(call keep_flags,$(OPS_FLAGS))
$(CUDA_FOLDERS:%=%/ops_flags): FORCE
	$(call keep_flags,$(NVCC_FLAGS) $(CUDA_LIBRARIES))
$(BUILD)/flags: FORCE
	$(call keep_flags,$(LINKED) $(OPS_FLAGS) $(NVCC_FLAGS),$(if $(filter cuda,$(HAS)),scripts/cuda_libraries.sh report;))

-include $(wildcard $(addsuffix /*.d,$(sort $(BUILD) $(DRIVER) $(CPU_FOLDERS) $(CUDA_FOLDERS))))

# DESTDIR: in front of PREFIX, for packagers
PREFIX ?= /usr/local
install: $(BUILD)/train
	install -d '$(DESTDIR)$(PREFIX)/bin'
	install $< '$(DESTDIR)$(PREFIX)/bin/streambp'

# BACKEND=cpu or all: one archive or wheel
dist wheel:
	@NVCC='$(NVCC)' scripts/dist.sh $(filter wheel,$@) $(patsubst BACKEND=%,%,$(filter BACKEND=%,$(MAKEOVERRIDES)))

build/deps.mk build/deps-cjson.mk: scripts/install_deps.sh
	@mkdir -p build
	@scripts/install_deps.sh build
	@touch $@

# ---- everything else is a script that make calls ---------------------------------------------------------------------
demo: train $(BUILD)/pack_bytes
	@scripts/install_deps.sh demo
	@BUILD=$(BUILD) scripts/demo.sh

test:
	@scripts/install_deps.sh test
	@test/run.sh

# Checks that every gradient still holds, within three minutes of CPU time, the build included
test-quick:
	@scripts/install_deps.sh test
	@test/run.sh --quick

# Runs what a change can break: the rows that read a file changed since a commit
REV ?= HEAD
test-since:
	@scripts/install_deps.sh test
	@test/run.sh --since $(REV)

# Needs a GPU; PARTS='ops methods' runs some rows of test/rows.txt. test-gpu-build only compiles and links: nvcc is
# enough (make BACKEND=cuda ARCHS=90 ...).
NVCC_LINK = $(if $(NVCC_LIBS),$(NVCC) -ccbin $(CXX) $(GENCODE))
test-gpu test-gpu-build:
	@scripts/install_deps.sh test
	@NVCC='$(NVCC)' NVCC_LINK='$(NVCC_LINK)' NVCC_LIBS='$(NVCC_LIBS)' ARCHS='$(ARCHS)' MAKE='$(MAKE_COMMAND)' \
		$(if $(and $(PORTABLE),$(filter all,$(NAME))),GPU_BUILD='$(BUILD)') test/run.sh --gpu $(if $(filter test-gpu-build,$@),--build) $(PARTS)

# Searches new inputs for every parser of files, options and answers with libFuzzer; TARGET='config shard' runs some.
fuzz:
	@TARGET='$(TARGET)' FUZZ_SECONDS='$(SECONDS)' nice test/fuzz/fuzz.sh

bench:
	@dev/bench.sh

# The driver also compiles as C++20.
check-cxx:
	$(CXX) -std=c++20 -D_GNU_SOURCE $(HAVE_LIBEVENT:yes=-DHAVE_LIBEVENT) $(CXX_WARNINGS) -I. -fsyntax-only -x c++ train_gpt.cu

LINTED  = llmc/ops/cpu/ops_cpu.c data/pack_bytes.c
SOURCES = $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cc')
format:
	@scripts/install_deps.sh lint
	clang-format -i $(SOURCES)

lint:
	@scripts/install_deps.sh lint
	clang-format --dry-run -Werror $(SOURCES)
	cppcheck --quiet --error-exitcode=1 --std=c11 --inline-suppr --suppressions-list=.cppcheck -I. -D_GNU_SOURCE \
		$(LINTED)
	clang-tidy --quiet $(LINTED) -- -std=gnu11 $(DEFINES) $(HAVE_OPENMP) -I.
	clang-tidy --quiet train_gpt.cu -- -x c -std=c11 -D_GNU_SOURCE $(HAVE_OPENMP) -I.

# ---- the kernel playground and the GPU's figures (dev/README.md) -----------------------------------------------------
# dev-cuda        one program for each kernel family: every variant checked, then timed with cold caches, on a GPU
# dev-cuda-check  the same checks on the CPU, sanitized; needs neither nvcc nor a GPU
# dev-cudnn-plans the workspaces of cuDNN's plans, for absent GPUs (BACKEND=cuda; needs no GPU)
# dev-collectives the rates of collectives between processes, on the CPU or on GPUs: mpirun -n P build/.../collectives
# bench-gpu       every op and `bp` at several lengths, into dev/results/
.PHONY: dev-cuda dev-cuda-check dev-cudnn-plans dev-collectives bench-gpu
DEV_CUDA  := $(patsubst dev/cuda/%.cu,%,$(filter-out dev/cuda/bench.cu,$(wildcard dev/cuda/*.cu)))
DEV_CHECK := $(filter-out linear,$(DEV_CUDA))# that one is cuBLASLt's alone
ifeq ($(BACKEND),cuda)
DEV_NVCC   = $(NVCC) $(NVCC_FLAGS)
dev-cuda: $(DEV_CUDA:%=$(BUILD)/dev_%)

$(DEV_CUDA:%=$(BUILD)/dev_%.o): $(BUILD)/dev_%.o: dev/cuda/%.cu $(BUILD)/flags
	$(DEV_NVCC) -MMD -MP -c $< -o $@

$(DEV_CUDA:%=$(BUILD)/dev_%): %: %.o
	$(NVCC_LINK) $< $(NVCC_LIBS) $(LDFLAGS) -o $@

$(BUILD)/cudnn_plans: dev/cuda/cudnn_plans.cc $(BUILD)/flags
	$(CXX) -std=c++20 -O1 -D_GNU_SOURCE $(CXX_WARNINGS) $(CUDA_LIBRARIES) -I. -MMD -MP $< -o $@ \
		$(RUN_PATHS:%=-Wl$(comma)-rpath$(comma)%) -ldl

$(BUILD)/stand_in/libcuda.so.1: dev/cuda/libcuda_stand_in.c
	@mkdir -p $(@D)
	$(CC) -O1 -Wall -Wextra $(WERROR) -shared -fPIC -Wl,-soname,libcuda.so.1 $< -o $@

dev-cudnn-plans: $(BUILD)/stand_in/libcuda.so.1 $(if $(WITH_CUDNN),$(BUILD)/cudnn_plans)
	@$(if $(WITH_CUDNN),,scripts/cuda_libraries.sh report; exit 1)
	LD_LIBRARY_PATH=$(BUILD)/stand_in:$(TOOLKIT)/lib64:$$LD_LIBRARY_PATH $(BUILD)/cudnn_plans

$(BUILD)/bench.o: dev/cuda/bench.cu $(BUILD)/flags
	$(DEV_NVCC) -MMD -MP -c $< -o $@

$(BUILD)/bench_decode.o: dev/bench.c $(BUILD)/flags
	$(CC) $(DRIVER_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/bench $(BUILD)/bench_decode: %: %.o $(BUILD)/ops.o
	$(NVCC_LINK) $^ $(NVCC_LIBS) $(LDFLAGS) -o $@
else
$(BUILD)/bench.o: dev/bench.c $(BUILD)/flags
	$(CC) $(DRIVER_FLAGS) -MMD -MP -c $< -o $@

# Their source includes op set "cpu".
$(BUILD)/product_rate.o $(BUILD)/bench_ops.o: $(BUILD)/%.o: dev/%.c $(BUILD)/flags
	$(CC) $(OPS_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/bench: $(BUILD)/bench.o $(BUILD)/product_rate.o $(BUILD)/op_sets.o $(DRIVER)/dist.o
$(BUILD)/bench_ops: $(BUILD)/bench_ops.o $(DRIVER)/dist.o
$(BUILD)/bench $(BUILD)/bench_ops:
	$(CC) $^ $(LDLIBS) $(LDFLAGS) -o $@

dev-cuda dev-cudnn-plans:
	@echo 'make $@ builds for GPUs: add BACKEND=cuda (nvcc 12 or 13); make dev-cuda-check needs neither' >&2; exit 1
endif

build/dev-cuda-check-$(PRECISION)/dev_%: dev/cuda/%.cu
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -x c++ -DCUDA_ON_CPU $(filter-out -DHAVE_ONEDNN,$(DEFINES)) $(CXX_WARNINGS) \
	    -Wno-unknown-pragmas -Wno-pass-failed -O1 -g -fsanitize=address,undefined -I. -MMD -MP $< -o $@ -lm

dev-cuda-check: $(DEV_CHECK:%=build/dev-cuda-check-$(PRECISION)/dev_%)
	@for program in $^; do $$program || exit 1; done

-include $(wildcard build/dev-cuda-check-$(PRECISION)/*.d)

dev-collectives: $(BUILD)/collectives

$(BUILD)/collectives.o: dev/collectives.c $(BUILD)/flags
	$(CC) $(DRIVER_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/collectives: $(BUILD)/collectives.o $(BUILD)/ops.o
	$(LINK) $^ $(LINKED) $(LDFLAGS) -o $@

# Looks for a GPU before it builds anything.
bench-gpu:
	@PRECISION=$(if $(filter cuda,$(BACKEND)),$(PRECISION),bf16) dev/bench_gpu.sh

clean:
	rm -rf build train

help:
	@sed -n '1,12s/^# //p' Makefile
