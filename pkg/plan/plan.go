// Package plan derives from API objects what there should be. Each package below it does so for one audience: client
// for those of an Egress, gateway for its routers, egress, cluster and pools for the controllers, routes for nodes; others
// derive what people are told, such as diagnosis, health and inventory for coilctl. This one has the words that several of them share.
//
// All of them are pure: the same input gives the same, sorted output. They must not know how anything is read or
// written.
package plan
