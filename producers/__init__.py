"""What puts records first: engines sample tokens, rollout workers turn tasks into trajectories.

engines/       the Engine protocol, its implementations, the weight subscriber, the HTTP interface
environments/  what answers the policy between its turns
rollout/       tasks -> environment loop -> trajectories, admitted by capacity
"""
