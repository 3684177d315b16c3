# Every target is one line; what it does is in hack/. "make help" lists them.

# Name and tag of the image. manifests/ has the default; README.md there shows how to change it.
IMAGE ?= localhost/coil:dev
# What "make release" makes: by default the version that the commit's tag names, for an image of this name without tag.
VERSION ?=
REPOSITORY ?= localhost/coil
# Nodes of the cluster that lab-up starts, that of the control plane included.
NODES ?= 3
# Further arguments of the test runner, such as ARGS='-run TestRestart ./pkg/node/...'.
ARGS ?=
# For how long "make fuzz" runs each function.
FUZZTIME ?= 5m

# Compiled packages don't depend on the path of the checkout: another checkout finds them in the cache.
export GOFLAGS += -trimpath

GOTEST = go run ./hack/gotest
LAB = go run ./integration/lab
FUZZ = go run ./hack/fuzz

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Start a cluster on this machine, install Coil and show that it works
	@hack/setup.sh demo && exec go run ./integration/demo

.PHONY: lab-up
lab-up: ## Start a cluster of NODES nodes with Coil on this machine
	$(LAB) up --nodes=$(NODES)

.PHONY: lab-down
lab-down: ## Remove that cluster
	$(LAB) down

.PHONY: lab-api
lab-api: ## Start only etcd and kube-apiserver, until interrupted
	$(LAB) api

.PHONY: setup
setup: ## Install the Debian packages that the other targets need
	hack/setup.sh test

.PHONY: build
build: ## Compile everything; the programs go to build/bin
	hack/build.sh

.PHONY: image
image: ## Build the container image IMAGE into build/coil-image.tar
	go run ./hack/image -name=$(IMAGE) -output=build/coil-image.tar

.PHONY: release
release: ## Make images, manifests, SBOMs and checksums of VERSION, by default the commit's tag, in build/release
	go run ./hack/release -version=$(VERSION) -image=$(REPOSITORY)

.PHONY: generate
generate: ## Generate code and CRDs
	hack/update-codegen.sh

.PHONY: clean
clean: ## Remove what was built
	rm -rf build bin

.PHONY: check
check: build lint test-unit verify ## Everything that needs neither root nor a cluster

.PHONY: lint
lint: ## Run the linters
	hack/lint.sh

.PHONY: verify
verify: ## Check that generated code, modules and format are as they should be
	hack/verify.sh

.PHONY: test
test: ## Run all tests, as root, with the race detector; a skipped one counts as failed. Fuzz each function for 1 s
	$(GOTEST) -race -tiers=netns,apiserver,cluster,vm -no-skips $(ARGS)
	$(if $(ARGS),,$(FUZZ) -time=1s)

.PHONY: bench
bench: ## Measure ADD, CHECK and DEL beside the kernel and the reference plugins, as root
	go run ./integration/bench $(ARGS)

.PHONY: fuzz
fuzz: ## Give each parser inputs that nobody thought of, for FUZZTIME each, as many at once as there are processors
	$(FUZZ) -time=$(FUZZTIME) $(ARGS)

.PHONY: test-unit
test-unit: ## Run the tests that need nothing
	$(GOTEST) $(ARGS)

.PHONY: test-netns
test-netns: ## Run the tests that make network namespaces, as root
	$(GOTEST) -tiers=netns $(ARGS)

.PHONY: test-apiserver
test-apiserver: ## Run the tests that start an API server
	$(GOTEST) -tiers=apiserver $(ARGS)

.PHONY: test-cluster
test-cluster: ## Run the tests that start clusters, as root
	$(GOTEST) -tiers=cluster $(ARGS)

.PHONY: test-crash
test-crash: ## Kill coild 500 times, its controller 200 times and starts of clusters, damage record and disk, as root; some 25 minutes
	COIL_CRASH=long $(GOTEST) -tiers=netns,apiserver -no-skips $(ARGS) ./integration/crash/ ./pkg/store/sqlite/
	$(if $(ARGS),,COIL_CRASH=long $(GOTEST) -tiers=apiserver -no-skips -run='^TestControllerKilled' ./integration/apiserver/)
	$(if $(ARGS),,COIL_CRASH=long $(GOTEST) -tiers=cluster -no-skips -run='^(TestDownAfterKill|TestManyPods)$$' ./integration/lab/cluster/ ./integration/cluster/)

.PHONY: test-routes
test-routes: ## Run BIRD and FRR, addresses that are announced to neighbours, neighbours that delete, chained plugins and the cleanup, as root; some 15 minutes
	COIL_REPAIR=long $(GOTEST) -tiers=netns,apiserver,vm -no-skips $(ARGS) ./integration/routes/ ./integration/neighbours/ ./integration/repair/ ./integration/chain/ ./integration/uninstall/

.PHONY: test-egress
test-egress: ## Run NAT routers with kernels that have FoU, each case often, as root
	COIL_EGRESS=long $(GOTEST) -tiers=netns,apiserver,vm -no-skips $(ARGS) ./integration/egress/... ./integration/lab/vm/
	$(if $(ARGS),,COIL_EGRESS=long $(GOTEST) -tiers=apiserver -no-skips -run='^TestEgress' ./integration/apiserver/)
	$(if $(ARGS),,COIL_EGRESS=long $(GOTEST) -tiers=netns -no-skips -run='^(TestClientChangesClosed|TestDirectNewFlowsStay|TestRandomHistories|TestAnyPodsChangeInTurn)$$' ./pkg/kernel/nft/ ./pkg/clientnet/ ./pkg/controller/egresspolicy/)

.PHONY: test-migrate
test-migrate: ## Move a cluster from Coil v1, killed at each step; take one from the version before and back, in each order; as root
	COIL_MIGRATE=long $(GOTEST) -tiers=apiserver,cluster -no-skips $(ARGS) ./integration/migrate/ ./integration/upgrade/ ./pkg/migrate/ ./pkg/plan/coilv1/

.PHONY: test-floating
test-floating: ## Cut the power of nodes, and divide networks; change all at random for 30 minutes; play 100,000 random histories; as root
	COIL_FLOATING=long $(GOTEST) -tiers=netns,apiserver -no-skips $(ARGS) ./integration/floating/
	COIL_FLOATING=long $(GOTEST) -tiers=netns,apiserver -no-skips $(ARGS) ./integration/egress/native/
	COIL_FLOATING=long $(GOTEST) -tiers=netns,apiserver -no-skips $(ARGS) ./pkg/holding/
	$(if $(ARGS),,COIL_FLOATING=long $(GOTEST) -tiers=netns,apiserver -no-skips -run='^TestFloatingAddress$$' ./integration/routes/)

.PHONY: test-lb
test-lb: ## Kill coil-lb-controller at each step, and calls of OpenStack; cut the power of nodes with addresses of Services, and of a gateway machine with systemd; reach them behind kube-proxy, play random histories; as root
	COIL_LB=long $(GOTEST) -tiers=netns,apiserver,cluster,vm -no-skips $(ARGS) ./pkg/plan/loadbalancer/ ./pkg/controller/loadbalancer/ ./pkg/node/floating/place/ ./pkg/node/floating/forwarding/ ./pkg/keepalived/ ./pkg/lbgateway/ ./pkg/kernel/nft/ ./integration/openstack/ ./integration/gateway/machine/
	$(if $(ARGS),,COIL_LB=long $(GOTEST) -tiers=netns,apiserver,cluster -no-skips -run='^Test(Service.*|Scenario.*|AddressOfService|LBController.*)$$' ./integration/apiserver/ ./integration/crash/ ./integration/floating/ ./integration/gateway/ ./integration/cluster/)

.PHONY: test-operate
test-operate: ## Look by coilctl at a cluster of 5,000 Nodes and 20,000 AddressBlocks, as root
	COIL_OPERATE=long $(GOTEST) -tiers=netns,apiserver -no-skips -run='^(TestStatus|TestCoilctl.*|TestLarge.*)$$' $(ARGS) ./integration/bench/scale/ ./integration/apiserver/ ./integration/page/

.PHONY: test-release
test-release: ## Make a release twice, for all architectures, and compile all of it each time; compare the bytes
	COIL_RELEASE=long $(GOTEST) -tiers=apiserver -no-skips $(ARGS) ./hack/release/

.PHONY: test-vm
test-vm: ## Run the tests that start virtual machines, as root
	$(GOTEST) -tiers=vm $(ARGS)

.PHONY: bench-scale
bench-scale: ## Measure Coil in a large cluster against its targets, as root
	go run ./integration/bench/scale $(ARGS)

.PHONY: bench-lb
bench-lb: ## Measure 5,000 Services: their addresses, a gateway machine, and packets beside kube-proxy, as root
	go run ./integration/bench/scale --parts=services,gateway,translation $(ARGS)

.PHONY: bench-egress
bench-egress: ## Compare routers with a path made by hand, and time failovers of both peerings, in a virtual machine, as root
	@hack/setup.sh bench-egress && exec go run ./integration/bench/egress $(ARGS)
