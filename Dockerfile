# The image for those who build with a container engine. "make image" makes one without, which
# is smaller: programs that are alike are one file there.
FROM golang:1.26 AS build
# What the programs print as their version, such as v3.0.0. By default it is what the go command finds in git.
ARG VERSION
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -tags=grpcnotrace -trimpath -buildvcs=auto -o /out/ \
    -ldflags="-s -w -X=github.com/coil-net/coil/pkg/app/program.version=$VERSION -X=github.com/coil-net/coil/pkg/app/coil.version=$VERSION" \
    $(go list ./cmd/... | grep -v -e /coil-controllers$ -e /coil-routers$ -e /coil-migrator$ -e /coilctl$)

FROM scratch
COPY --from=build /out/ /
ENV PATH=/
USER 0:0
