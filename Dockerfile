# The image for those who build with a container engine. "make image" makes one without, which
# is smaller: programs that are alike are one file there.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -tags=grpcnotrace -trimpath -buildvcs=auto -ldflags='-s -w' -o /out/ \
    $(go list ./cmd/... | grep -v -e /coil-controllers$ -e /coil-routers$)

FROM scratch
COPY --from=build /out/ /
ENV PATH=/
USER 0:0
