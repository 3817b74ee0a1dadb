"""tasks -> environment loop -> trajectories, admitted by capacity."""
